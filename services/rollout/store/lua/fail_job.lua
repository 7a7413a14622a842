-- ARGV: 2 unit, 3 member, 4 attempt, 5 reason, 6 "1" if it was not the job's fault.
local MAX_OUTSIDE = 32 -- a start that ends its simulator every time must not hold up the run for ever
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
local outside = ARGV[6] == '1'
count((group_of(unit) and '' or 'evaluation_') .. (outside and 'given_back' or 'failed'))
local field, limit = 'f:', tonumber(M.max_attempts)
if outside then field, limit = 'o:', MAX_OUTSIDE end
if call('HINCRBY', key, field .. member, 1) >= limit then
  call('ZREM', FREE_EVAL, unit .. '|' .. member)
  give_up(unit, member, ARGV[5])
else
  offer(unit, member)
end
wake('jobs')
return { 'OK' }
