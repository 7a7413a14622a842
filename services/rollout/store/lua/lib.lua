-- Shared by every script: names of keys, the run's record, the clock, counters, wake-ups.
--
-- KEYS[1]  "dvla:{run}:meta". All control keys of a run share its hash tag, so they live in one cluster slot; the
--          others are derived here, because which ones are needed is known only inside the script.
-- ARGV[1]  milliseconds added to Redis TIME: 0, except in tests that move the clock.
--
-- A reply starts with a status: OK, or NO_RUN, FENCED, AHEAD, INVALID, MISSING, SUPERSEDED, ... and its facts.
local call = redis.call
local P = string.sub(KEYS[1], 1, -5)
local META, SPEC = KEYS[1], P .. 'spec'
-- Groups, all scored by group number: `live` is admission order; `open` of them are not in the stream yet, `ready`
-- are in the stream but not leased, the rest are leased. `trained` and `acked` are scored by update.
local LIVE, OPEN, READY = P .. 'live', P .. 'open', P .. 'ready'
local TRAINED, ACKED, EVICTABLE = P .. 'trained', P .. 'acked', P .. 'evictable'
local STREAM, DEAD = P .. 'stream', P .. 'dead'
-- Jobs, named "<unit>|<member>"; a unit is a group "g:<number>" or an evaluation "e:<name>".
local FREE, FREE_EVAL, GRANTS = P .. 'free', P .. 'free_eval', P .. 'grants'
local WORKERS, ARRIVALS = P .. 'workers', P .. 'arrivals'
local COUNTERS, SUMS, STALENESS = P .. 'counters', P .. 'sums', P .. 'staleness'
-- Blobs being written, and blobs that nobody needs any more.
local PENDING, GARBAGE = P .. 'pending', P .. 'garbage'
-- Extents in arenas are named "@<arena>:...". By arena: those that claims need, and those that nobody needs any more.
local OWNERS, HELD, SPENT = P .. 'owners', P .. 'held:', P .. 'spent:'
local LEARNERS, RANK0 = 'learners', 'rank0'

-- At the memory limit Redis refuses commands that may grow, unless the script has written already. A deletion is
-- never refused, so with it every script runs at the limit.
call('DEL', P .. 'scratch')

local M = {} -- the run's record; empty if there is no such run
do
  local flat = call('HGETALL', META)
  for i = 1, #flat, 2 do M[flat[i]] = flat[i + 1] end
end
local G, B = tonumber(M.group_size), tonumber(M.groups_per_update)

local function int(number) return string.format('%.0f', number) end

local clock
local function now()
  if not clock then
    local time = call('TIME')
    clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(ARGV[1])
  end
  return clock
end

local function count(name, by)
  if by ~= 0 then call('HINCRBY', COUNTERS, name, int(by or 1)) end
end

local function sum(name, by)
  if by ~= 0 then call('HINCRBY', SUMS, name, int(by)) end
end

local function arena_of(blob) return string.match(blob, '^@([^:]+):') end

-- Nobody needs these bytes any more: the replicas, or the arena's owner, will delete them.
local function waste(blob)
  local arena = arena_of(blob)
  if not arena then return call('SADD', GARBAGE, blob) end
  call('SREM', HELD .. arena, blob)
  call('SADD', SPENT .. arena, blob)
end

local function wake(what) call('PUBLISH', P .. 'wake', what) end

-- Refuses a learner of an older epoch; an epoch that this Redis has never granted means that Redis lost its data.
local function fenced(epoch)
  if not M.epoch then return { 'NO_RUN' } end
  if tonumber(epoch) < tonumber(M.epoch) then return { 'FENCED', M.epoch } end
  if tonumber(epoch) > tonumber(M.epoch) then return { 'AHEAD', M.epoch } end
  return nil
end
