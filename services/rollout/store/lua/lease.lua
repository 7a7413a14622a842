-- ARGV: 2 epoch, 3 groups wanted, 4 cursor of the caller or empty for the one kept here.
local DELIVERIES = 32 -- a group that ends its learner every time; the learner's own nack comes long before
local refused = fenced(ARGV[2])
if refused then return refused end
local wanted = tonumber(ARGV[3])
local cursor = ARGV[4] ~= '' and ARGV[4] or M.cursor
local groups = {}

local function deliver(group, id)
  local key = P .. 'g:' .. group
  local update = call('ZSCORE', TRAINED, group)
  call('ZREM', READY, group)
  if not update and call('HINCRBY', key, 'd', 1) > DELIVERIES then
    return bury(group, 'delivered ' .. DELIVERIES .. ' times without being trained')
  end
  local claims = {}
  for member = 0, G - 1 do claims[member + 1] = call('HGET', key, 'c:' .. member) or '' end
  groups[#groups + 1] = { group, call('HGET', key, 'task'), update and int(tonumber(update)) or '0', claims }
end

-- Reads on from the cursor (what was delivered before) or at '>' (what was not); false when there is no more.
local function read(from)
  local reply = redis.pcall('XREADGROUP', 'GROUP', LEARNERS, RANK0, 'COUNT', wanted - #groups, 'STREAMS', STREAM, from)
  if reply and reply.err then -- the stream was deleted by someone else
    redis.pcall('XGROUP', 'CREATE', STREAM, LEARNERS, '0', 'MKSTREAM')
    return false
  end
  if not reply or #reply[1][2] == 0 then return false end
  for _, entry in ipairs(reply[1][2]) do
    local id, fields = entry[1], entry[2]
    local group = fields and fields[2]
    cursor = id
    if group and call('HGET', P .. 'g:' .. group, 'id') == id then
      deliver(group, id)
    else -- trimmed by someone else, or restored under another id
      call('XACK', STREAM, LEARNERS, id)
      call('XDEL', STREAM, id)
    end
  end
  return true
end

while #groups < wanted and read(cursor) do end
while #groups < wanted and read('>') do end
if #groups == 0 and call('ZCARD', READY) > 0 then -- entries vanished before anybody read them
  restream(call('ZRANGE', READY, 0, -1))
  while #groups < wanted and read('>') do end
end
call('HSET', META, 'cursor', cursor)
return { 'OK', cursor, M.seed_base, groups }
