-- ARGV: 2 arena. Its node is gone, and with it the bytes that lay there. Groups that the learner does not have yet are
-- replaced; it may have the bytes of the others already, and refuses them if not.
if not M.epoch then return { 'NO_RUN' } end
local arena = ARGV[2]

local function lost(group)
  for member = 0, G - 1 do
    local blob = call('HGET', P .. 'g:' .. group, 'b:' .. member)
    if blob and arena_of(blob) == arena then return true end
  end
  return false
end

local groups = 0
for _, group in ipairs(call('ZRANGE', LIVE, 0, -1)) do
  if lost(group) then
    if call('ZSCORE', OPEN, group) or call('ZSCORE', READY, group) then
      discard(group, 'lost')
      groups = groups + 1
    else
      call('HSET', P .. 'g:' .. group, 'lost', 1)
    end
  end
end
-- Trained groups and dead letters: they cannot be rolled back or replayed any more.
for _, group in ipairs(call('ZRANGE', EVICTABLE, 0, -1)) do
  if lost(group) then
    free_bytes(group)
    call('HSET', P .. 'g:' .. group, 'evicted', 1)
    call('ZREM', EVICTABLE, group)
  end
end
call('DEL', HELD .. arena, SPENT .. arena)
call('SREM', OWNERS, arena)
return { 'OK', groups }
