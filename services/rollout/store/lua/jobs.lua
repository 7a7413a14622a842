-- Jobs: who holds which, and what happens when nobody does any more.
--
-- Fields of a unit's hash, per member: a attempt granted last, h worker that holds it, l attempt that failed last,
-- f failures, o failures that were not its fault, x expiries, c accepted claim (empty: scores zero), b blob, z final failure. A worker's hash "w:<name>"
-- has the jobs that it holds, each with the id of the request that granted it.
-- An attempt whose grant expired stays acceptable until the next one is granted; a failed one does not.
local MAX_EXPIRIES = 8 -- a start that ends its worker every time must not hold up the run for ever
local LIFETIMES = 20 -- grant times after which even a renewed grant expires: its worker may not know of it

local fill, discard -- in groups.lua

local function split(job)
  local unit, member = string.match(job, '^(.*)|(%d+)$')
  return unit, member
end

local function group_of(unit) return string.match(unit, '^g:(%d+)$') end

local function unassign(unit, member)
  local job, worker = unit .. '|' .. member, call('HGET', P .. unit, 'h:' .. member)
  if worker then
    call('HDEL', P .. 'w:' .. worker, job)
    call('ZREM', GRANTS, job)
    call('HDEL', P .. unit, 'h:' .. member)
  end
end

local function offer(unit, member)
  local group = group_of(unit)
  if group then
    call('ZADD', FREE, group, unit .. '|' .. member)
  else
    local order = tonumber(call('HGET', P .. unit, 'seq')) * 1000000 + tonumber(member)
    call('ZADD', FREE_EVAL, int(order), unit .. '|' .. member)
  end
end

local function assign(job, worker, request)
  local unit, member = split(job)
  local attempt = call('HINCRBY', P .. unit, 'a:' .. member, 1)
  call('HSET', P .. unit, 'h:' .. member, worker)
  call('HSET', P .. 'w:' .. worker, job, request)
  -- Longer with every attempt, so that an episode of any length gets through in the end.
  local lifetime = tonumber(M.grant_ms) * LIFETIMES * 2 ^ math.min(attempt - 1, 16)
  call('ZADD', GRANTS, int(now() + lifetime), job)
end

-- One episode of an evaluation is decided.
local function decided(unit)
  if call('HINCRBY', P .. unit, 'n', 1) == tonumber(call('HGET', P .. unit, 'total')) then
    call('EXPIRE', P .. unit, 86400)
    wake('evals')
  end
end

local function give_up(unit, member, reason)
  local group = group_of(unit)
  if not group then
    call('HSET', P .. unit, 'z:' .. member, reason)
    decided(unit)
  elseif M.on_failure == 'zero' then
    count('zeroed')
    call('HSET', P .. unit, 'z:' .. member, reason)
    fill(group, member, '', '0')
  else
    discard(group, 'discarded_failed')
  end
end

local function release(job)
  local unit, member = split(job)
  if call('HEXISTS', P .. unit, 'h:' .. member) == 0 then return end -- went with its group a moment ago
  unassign(unit, member)
  count(group_of(unit) and 'expired' or 'evaluation_expired')
  if call('HINCRBY', P .. unit, 'x:' .. member, 1) >= MAX_EXPIRIES then
    give_up(unit, member, MAX_EXPIRIES .. ' grants expired; the last one: ' .. job)
  else
    offer(unit, member)
  end
end

-- Workers that fell silent lose their jobs.
local function expire()
  local silent = call('ZRANGEBYSCORE', WORKERS, '-inf', '(' .. int(now()))
  for _, worker in ipairs(silent) do
    for _, job in ipairs(call('HKEYS', P .. 'w:' .. worker)) do release(job) end
    call('ZREM', WORKERS, worker)
    call('ZREM', ARRIVALS, worker)
  end
  local old = call('ZRANGEBYSCORE', GRANTS, '-inf', '(' .. int(now()))
  for _, job in ipairs(old) do release(job) end
  if #silent + #old > 0 then wake('jobs') end
end

local function seen(worker)
  if call('ZADD', WORKERS, int(now() + tonumber(M.grant_ms)), worker) == 1 then
    call('ZADD', ARRIVALS, call('HINCRBY', META, 'arrivals', 1), worker)
  end
end
