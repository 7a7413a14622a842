-- ARGV: 2 group, 3 start state.
if not M.epoch then return { 'NO_RUN' } end
local key = P .. 'g:' .. ARGV[2]
if not call('ZSCORE', LIVE, ARGV[2]) then return { 'MISSING', 'group ' .. ARGV[2] .. ' is not live; take another job' } end
call('HSETNX', key, 'start', ARGV[3])
return { 'OK', call('HGET', key, 'start') }
