-- ARGV: 2 worker.
if not M.epoch then return { 'NO_RUN' } end
expire()
seen(ARGV[2])
return { 'OK', call('HLEN', P .. 'w:' .. ARGV[2]) }
