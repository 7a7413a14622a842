-- ARGV: 2 spec, 3 floor epoch, 4 resume update, then pairs of fields of the run's record.
local spec, floor, resume = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local rolled_back, lost = {}, {}

if not M.epoch then
  for i = 5, #ARGV, 2 do
    M[ARGV[i]] = ARGV[i + 1]
    call('HSET', META, ARGV[i], ARGV[i + 1])
  end
  call('SET', SPEC, spec)
  -- A floor without a run: Redis was replaced. Groups go on above all numbers that earlier epochs can have used,
  -- because the learner's checkpoint may name some of those as trained.
  local first = int(floor * 2 ^ 24)
  call('HSET', META, 'update', ARGV[4], 'last_group', first, 'first_group', first, 'bytes', 0)
  M.epoch, M.update = '0', ARGV[4]
  G, B = tonumber(M.group_size), tonumber(M.groups_per_update)
elseif call('GET', SPEC) ~= spec then
  return { 'OTHER_SPEC', call('GET', SPEC) }
end
redis.pcall('XGROUP', 'CREATE', STREAM, LEARNERS, '0', 'MKSTREAM') -- an existing group is fine

-- Roll back what was trained after the checkpoint. What was freed already is lost, and said to be.
for _, group in ipairs(call('ZRANGEBYSCORE', TRAINED, '(' .. ARGV[4], '+inf')) do
  untrain(group)
  if call('HEXISTS', P .. 'g:' .. group, 'evicted') == 1 then
    forget(group)
    lost[#lost + 1] = group
  else
    call('ZADD', LIVE, group, group)
    rolled_back[#rolled_back + 1] = group
  end
end
for _, group in ipairs(call('ZRANGEBYSCORE', ACKED, '(' .. ARGV[4], '+inf')) do lost[#lost + 1] = group end
call('ZREMRANGEBYSCORE', ACKED, '(' .. ARGV[4], '+inf')
count('rolled_back', #rolled_back)
count('lost', #lost)

-- If someone trimmed the stream, rebuild it from the groups' own records: nothing is lost with an entry.
local streamed, broken = {}, false
for _, group in ipairs(call('ZRANGE', LIVE, 0, -1)) do
  if not call('ZSCORE', OPEN, group) then
    local id = call('HGET', P .. 'g:' .. group, 'id')
    streamed[#streamed + 1] = group
    broken = broken or not id or #call('XRANGE', STREAM, id, id) == 0
  end
end
if broken then restream(streamed) end

-- A learner that is ahead (Redis lost its last second) keeps its number; it records the missing groups next.
local epoch = int(math.max(tonumber(M.epoch), floor) + 1)
call('HSET', META, 'epoch', epoch, 'update', ARGV[4], 'cursor', '0-0', 'finished', 0)
wake('jobs')
wake('groups')
return { 'OK', epoch, ARGV[4], rolled_back, lost }
