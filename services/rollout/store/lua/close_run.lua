-- ARGV: 2 epoch, 3 1 if nothing that is left will be trained.
local refused = fenced(ARGV[2])
if refused then return refused end
call('HSET', META, 'finished', 1)
-- After the last update nothing that is left can be trained any more; before it the run may be resumed.
if ARGV[3] == '1' or tonumber(M.update) >= tonumber(M.total_updates) then
  for _, group in ipairs(call('ZRANGE', LIVE, 0, -1)) do forget(group) end
end
wake('jobs')
wake('groups')
return { 'OK' }
