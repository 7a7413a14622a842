-- ARGV: 2 name, 3 version "epoch/update", 4 digest of version and episodes, then task and seed of each episode.
if not M.epoch then return { 'NO_RUN' } end
local unit = 'e:' .. ARGV[2]
local key = P .. unit
local before = call('HGET', key, 'digest')
if before == ARGV[4] then return { 'OK' } end
if before then return { 'INVALID', 'evaluation ' .. ARGV[2] .. ' exists with another version or other episodes' } end
local total = (#ARGV - 4) / 2
call('HSET', key, 'version', ARGV[3], 'digest', ARGV[4], 'total', total, 'n', 0,
  'seq', call('HINCRBY', META, 'evaluations', 1))
for number = 1, total do
  call('HSET', key, 'task:' .. number, ARGV[3 + 2 * number], 'seed:' .. number, ARGV[4 + 2 * number])
  offer(unit, number)
end
wake('jobs')
return { 'OK' }
