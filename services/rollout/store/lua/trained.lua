-- ARGV: 2 epoch, 3 update, then groups.
local refused = fenced(ARGV[2])
if refused then return refused end
local update, done = tonumber(ARGV[3]), tonumber(M.update)
if update > done + 1 then
  return { 'INVALID', 'update ' .. ARGV[3] .. ' does not follow update ' .. M.update .. '; expected ' .. int(done + 1) }
end

-- Check everything before changing anything.
local fresh, named, lost = {}, {}, 0
for i = 4, #ARGV do
  local group = ARGV[i]
  local before = call('ZSCORE', TRAINED, group)
  if named[group] then return { 'INVALID', 'group ' .. group .. ' is named twice' } end
  named[group] = true
  if before and tonumber(before) ~= update then
    return { 'INVALID', 'group ' .. group .. ' made update ' .. int(tonumber(before)) .. ' already' }
  elseif not before then
    local live = call('ZSCORE', LIVE, group)
    local leased = live and not call('ZSCORE', OPEN, group) and not call('ZSCORE', READY, group)
    if leased then
      fresh[#fresh + 1] = group
    elseif not live and tonumber(group) <= tonumber(M.first_group) then
      lost = lost + 1 -- leased from a Redis that was replaced since
    elseif update > done or live then
      return { 'INVALID', 'group ' .. group .. ' is not leased' }
    end -- else: acked long ago; a repeated record has nothing to add
  end
end
for _, group in ipairs(fresh) do record_trained(group, ARGV[3]) end
if update > done then
  call('HSET', META, 'update', ARGV[3])
  count('lost', lost)
end
if #fresh > 0 then wake('jobs') end
return { 'OK' }
