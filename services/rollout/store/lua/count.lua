-- ARGV: 2 counter.
if not M.epoch then return { 'NO_RUN' } end
count(ARGV[2])
return { 'OK' }
