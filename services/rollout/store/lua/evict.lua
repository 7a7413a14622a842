-- ARGV: 2 groups. Gives up the bytes of dead letters, then of the oldest trained groups.
if not M.epoch then return { 'NO_RUN' } end
local groups = call('ZRANGE', EVICTABLE, 0, tonumber(ARGV[2]) - 1)
for _, group in ipairs(groups) do
  free_bytes(group)
  call('HSET', P .. 'g:' .. group, 'evicted', 1)
  call('ZREM', EVICTABLE, group)
end
count('evicted', #groups)
return { 'OK', #groups }
