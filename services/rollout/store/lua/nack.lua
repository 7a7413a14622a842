-- ARGV: 2 epoch, 3 group, 4 reason.
local refused = fenced(ARGV[2])
if refused then return refused end
local group = ARGV[3]
if call('HEXISTS', P .. 'g:' .. group, 'dead') == 1 then return { 'OK' } end -- refused before
if call('ZSCORE', TRAINED, group) then return { 'INVALID', 'group ' .. group .. ' was trained; it cannot be refused' } end
local live = call('ZSCORE', LIVE, group)
if not live then return { 'MISSING', 'there is no group ' .. group } end
if call('ZSCORE', OPEN, group) or call('ZSCORE', READY, group) then
  return { 'INVALID', 'group ' .. group .. ' is not leased' }
end
bury(group, ARGV[4])
return { 'OK' }
