-- ARGV: 2 unit, 3 member, 4 attempt, 5 claim, 6 blob, 7 bytes, 8 score, 9 steps, 10 success, 11 oldest update,
--       12 and 13 oldest and newest version "epoch/update".
local unit, member, attempt, claim, blob = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local key, group = P .. unit, group_of(ARGV[2])
if not M.epoch then return { 'NO_RUN' } end

local function leave(status)
  if blob ~= '' and call('ZREM', PENDING, blob) == 1 then call('SADD', GARBAGE, blob) end
  return status
end

local state = call('HMGET', key, 'a:' .. member, 'l:' .. member, 'b:' .. member, 'z:' .. member)
local filled = call('HEXISTS', key, 'c:' .. member) == 1
if state[1] ~= attempt or state[2] == attempt or state[4] then
  count('superseded')
  local current = state[1] and ('attempt ' .. state[1] .. ' is the current one') or 'its group is gone'
  return leave({ 'SUPERSEDED', 'attempt ' .. attempt .. ' of ' .. unit .. ' member ' .. member
    .. ' is superseded: ' .. current .. '; drop the episode and take another job' })
end
if filled then
  if state[3] == blob then return { 'OK', 0 } end -- our own call again, its reply was lost
  count('repeated')
  return leave({ 'OK', 1 })
end
if not group and (call('HGET', key, 'version') ~= ARGV[12] or ARGV[12] ~= ARGV[13]) then
  return { 'INVALID', 'an episode of this evaluation must be made with version ' .. call('HGET', key, 'version')
    .. ' only; it has ' .. ARGV[12] .. ' to ' .. ARGV[13] }
end
local arena = arena_of(blob)
if group and not arena and call('ZREM', PENDING, blob) == 0 then return { 'BLOB_LOST' } end -- swept as an orphan

local worker = call('HGET', key, 'h:' .. member)
if worker then call('ZADD', WORKERS, 'XX', int(now() + tonumber(M.grant_ms)), worker) end
unassign(unit, member)
if not group then
  call('ZREM', FREE_EVAL, unit .. '|' .. member)
  call('HSET', key, 'c:' .. member, claim)
  decided(unit)
  return { 'OK', 0 }
end

local bytes, steps, success, oldest = tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
call('HSET', key, 'b:' .. member, blob)
if arena then
  call('SADD', HELD .. arena, blob)
  call('SADD', OWNERS, arena)
end
call('HINCRBY', key, 'bytes', bytes)
call('HINCRBY', META, 'bytes', bytes)
call('HINCRBY', key, 'eps', 1)
call('HINCRBY', key, 'len', steps)
call('HINCRBY', key, 'succ', success)
local before = call('HGET', key, 'w')
if not before or oldest < tonumber(before) then call('HSET', key, 'w', ARGV[11]) end
-- Before any filter, so that these sums show what was collected.
count('accepted')
count('accepted_steps', steps)
sum('accepted_success', success)
sum('accepted_length', steps)
fill(group, member, claim, ARGV[8])
return { 'OK', 0 }
