-- ARGV: 2 letter, 3 "look" to get the group's blobs, "move" to put it back.
if not M.epoch then return { 'NO_RUN' } end
local entry = call('XRANGE', DEAD, ARGV[2], ARGV[2])[1]
if not entry then return { 'MISSING', 'there is no dead letter ' .. ARGV[2] } end
local group = entry[2][2]
local key = P .. 'g:' .. group
if call('HGET', key, 'dead') ~= ARGV[2] or call('HEXISTS', key, 'evicted') == 1 then
  return { 'MISSING', 'the bytes of group ' .. group .. ' are gone' }
end
if ARGV[3] == 'look' then
  local blobs = {}
  for member = 0, G - 1 do blobs[#blobs + 1] = call('HGET', key, 'b:' .. member) or nil end
  return { 'OK', group, blobs }
end
call('XDEL', DEAD, ARGV[2])
call('HDEL', key, 'dead', 'd')
call('ZREM', EVICTABLE, group)
call('ZADD', LIVE, group, group)
call('ZADD', OPEN, group, group)
count('replayed')
advance()
return { 'OK', group, {} }
