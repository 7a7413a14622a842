-- ARGV: 2 milliseconds that an upload may take. Expires what is due and names blobs that can be deleted; says 1 if
-- nothing will be due any more.
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
return { 'OK', garbage, at_rest and 1 or 0 }
