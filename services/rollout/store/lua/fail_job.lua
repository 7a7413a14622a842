-- ARGV: 2 unit, 3 member, 4 attempt, 5 reason.
local unit, member, attempt = ARGV[2], ARGV[3], ARGV[4]
local key = P .. unit
if not M.epoch then return { 'NO_RUN' } end
local state = call('HMGET', key, 'a:' .. member, 'l:' .. member, 'z:' .. member)
if state[1] and state[2] == attempt then return { 'OK' } end -- reported before
if state[1] ~= attempt or state[3] or call('HEXISTS', key, 'c:' .. member) == 1 then
  count('superseded')
  return { 'SUPERSEDED', 'attempt ' .. attempt .. ' of ' .. unit .. ' member ' .. member
    .. ' is superseded; take another job' }
end
unassign(unit, member)
call('HSET', key, 'l:' .. member, attempt)
count(group_of(unit) and 'failed' or 'evaluation_failed')
if call('HINCRBY', key, 'f:' .. member, 1) >= tonumber(M.max_attempts) then
  call('ZREM', FREE_EVAL, unit .. '|' .. member)
  give_up(unit, member, ARGV[5])
else
  offer(unit, member)
end
wake('jobs')
return { 'OK' }
