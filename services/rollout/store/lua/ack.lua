-- ARGV: 2 epoch, 3 update of the checkpoint.
local REMEMBERED = 4096 -- acked groups that a learner which falls back further can still be told about
local refused = fenced(ARGV[2])
if refused then return refused end
if tonumber(ARGV[3]) > tonumber(M.update) then
  return { 'INVALID', 'checkpoint of update ' .. ARGV[3] .. ' is ahead of update ' .. M.update
    .. '; record the groups of each update first' }
end
local groups = call('ZRANGEBYSCORE', TRAINED, '-inf', ARGV[3])
for _, group in ipairs(groups) do
  local update = call('ZSCORE', TRAINED, group)
  forget(group)
  call('ZADD', ACKED, update, group)
end
call('ZREMRANGEBYRANK', ACKED, 0, -REMEMBERED - 1)
count('acked', #groups)
return { 'OK', groups }
