-- ARGV: 2 groups at most.
if not M.epoch then return { 'NO_RUN' } end
local wanted, groups = tonumber(ARGV[2]), {}

local function state_of(group)
  if call('ZSCORE', TRAINED, group) then return 'trained' end
  if call('ZSCORE', READY, group) then return 'streamed' end
  if not call('ZSCORE', OPEN, group) then return 'leased' end
  return tonumber(call('HGET', P .. 'g:' .. group, 'n')) < G and 'open' or 'waiting'
end

local function add(group)
  local facts = call('HMGET', P .. 'g:' .. group, 'n', 'bytes', 'at', 'd')
  local workers = {}
  for member = 0, G - 1 do workers[#workers + 1] = call('HGET', P .. 'g:' .. group, 'h:' .. member) or nil end
  local age = facts[3] and int(now() - tonumber(facts[3])) or '0'
  groups[#groups + 1] = { group, state_of(group), facts[1], facts[2] or '0', age, facts[4] or '0', workers }
end

for _, set in ipairs({ TRAINED, LIVE }) do
  for _, group in ipairs(call('ZRANGE', set, 0, wanted - 1)) do
    if #groups < wanted then add(group) end
  end
end
local pending = redis.pcall('XPENDING', STREAM, LEARNERS)
local oldest = call('XRANGE', DEAD, '-', '+', 'COUNT', 1)[1]
return {
  'OK', M.epoch, M.finished or '0', G, call('XLEN', STREAM), pending.err and 0 or pending[1], call('XLEN', DEAD),
  oldest and int(now() - tonumber(oldest[2][6])) or '0', groups,
}
