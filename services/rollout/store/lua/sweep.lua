-- ARGV: 2 milliseconds that an upload may take, then arenas of the caller. Expires what is due and names blobs that
-- can be deleted; says 1 if nothing will be due any more; names extents of the caller's arenas that can be freed (once:
-- if this reply is lost, the owner finds them by comparing).
if not M.epoch then return { 'NO_RUN' } end
expire()
-- A blob is registered with 0 before its bytes are written; its time starts when a sweep first sees it.
for _, blob in ipairs(call('ZRANGEBYSCORE', PENDING, 0, 0)) do
  call('ZADD', PENDING, int(now() + tonumber(ARGV[2])), blob)
end
for _, blob in ipairs(call('ZRANGEBYSCORE', PENDING, 1, now())) do
  call('ZREM', PENDING, blob)
  call('SADD', GARBAGE, blob)
  count('orphans')
end
local garbage = call('SRANDMEMBER', GARBAGE, 256)
local at_rest = M.finished == '1' and #garbage == 0
for _, set in ipairs({ PENDING, EVICTABLE, GRANTS, WORKERS, FREE_EVAL }) do at_rest = at_rest and call('ZCARD', set) == 0 end
local spent = {}
for i = 3, #ARGV do
  for _, blob in ipairs(call('SPOP', SPENT .. ARGV[i], 256)) do spent[#spent + 1] = blob end
end
for _, arena in ipairs(call('SMEMBERS', OWNERS)) do
  at_rest = at_rest and call('SCARD', SPENT .. arena) == 0
end
return { 'OK', garbage, at_rest and 1 or 0, spent }
