if not M.epoch then return { 'NO_RUN' } end
local open, unstreamed = 0, call('ZRANGE', OPEN, 0, -1)
for _, group in ipairs(unstreamed) do
  if tonumber(call('HGET', P .. 'g:' .. group, 'n')) < G then open = open + 1 end
end
local live, ready = call('ZCARD', LIVE), call('ZCARD', READY)
return {
  'OK', M.update, open, #unstreamed - open + ready, live - #unstreamed - ready + call('ZCARD', TRAINED),
  call('ZCARD', GRANTS), call('ZCARD', WORKERS), M.bytes,
  call('HGETALL', COUNTERS), call('HGETALL', SUMS), call('HGETALL', STALENESS),
}
