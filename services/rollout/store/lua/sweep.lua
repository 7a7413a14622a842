-- ARGV: 2 milliseconds that an upload may take. Expires what is due and names blobs that can be deleted.
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
return { 'OK', call('SRANDMEMBER', GARBAGE, 256) }
