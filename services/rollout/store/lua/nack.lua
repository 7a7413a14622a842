-- ARGV: 2 epoch, 3 group, 4 reason, 5 "1" to discard it without a dead letter.
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
if call('HEXISTS', P .. 'g:' .. group, 'lost') == 1 then
  discard(group, 'lost') -- with the node that had its bytes; there is nothing to replay
elseif ARGV[5] == '1' then
  discard(group, 'discarded_batch')
else
  bury(group, ARGV[4])
end
return { 'OK' }
