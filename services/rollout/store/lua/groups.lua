-- Groups: admitted, completed, streamed in admission order, trained, freed.
--
-- Fields of a group's hash besides those per member: at time of admission, task, start, n members filled, lo and hi score, w oldest update
-- of its weights, eps episodes, len steps, succ successes, bytes, id stream entry, d deliveries, st staleness,
-- evicted, dead letter.
local DEAD_LETTERS = 1000 -- kept; older ones are given up

-- Tasks take turns by weight: the one that is furthest behind its share, the first of them in case of a tie.
local function next_task()
  local best, least
  for i = 1, tonumber(M.tasks) do
    local turns = (tonumber(M['turn:' .. i] or 0) + 1) / tonumber(M['weight:' .. i])
    if not best or turns < least then best, least = i, turns end
  end
  M['turn:' .. best] = call('HINCRBY', META, 'turn:' .. best, 1)
  return M['task:' .. best]
end

local function admit()
  local group = int(call('HINCRBY', META, 'last_group', 1))
  call('HSET', P .. 'g:' .. group, 'task', next_task(), 'n', 0, 'at', int(now()))
  call('ZADD', LIVE, group, group)
  call('ZADD', OPEN, group, group)
  for member = 0, G - 1 do offer('g:' .. group, member) end
  count('admitted')
end

local function stream(group)
  local id = call('XADD', STREAM, '*', 'group', group)
  call('HSET', P .. 'g:' .. group, 'id', id)
  call('ZADD', READY, group, group)
end

local function unstream(group)
  local id = call('HGET', P .. 'g:' .. group, 'id')
  if id then
    call('XACK', STREAM, LEARNERS, id)
    call('XDEL', STREAM, id)
    call('HDEL', P .. 'g:' .. group, 'id')
  end
end

-- Appends the longest finished prefix: stream order is admission order, whoever finishes first.
local function advance()
  local moved = false
  while true do
    local head = call('ZRANGE', OPEN, 0, 0)[1]
    if not head or tonumber(call('HGET', P .. 'g:' .. head, 'n')) < G then break end
    call('ZREM', OPEN, head)
    stream(head)
    moved = true
  end
  if moved then wake('groups') end
end

local function free_bytes(group)
  local key = P .. 'g:' .. group
  for member = 0, G - 1 do
    local blob = call('HGET', key, 'b:' .. member)
    if blob then
      waste(blob)
      call('HDEL', key, 'b:' .. member)
    end
  end
  local size = tonumber(call('HGET', key, 'bytes') or 0)
  if size > 0 then
    call('HINCRBY', META, 'bytes', int(-size))
    call('HDEL', key, 'bytes')
  end
end

local function forget(group)
  for member = 0, G - 1 do
    unassign('g:' .. group, member)
    call('ZREM', FREE, 'g:' .. group .. '|' .. member)
  end
  free_bytes(group)
  unstream(group)
  for _, set in ipairs({ LIVE, OPEN, READY, TRAINED, EVICTABLE }) do call('ZREM', set, group) end
  call('DEL', P .. 'g:' .. group)
end

-- Removes a live group; a new one will be admitted in its place.
function discard(group, counter)
  forget(group)
  count(counter)
  advance()
  wake('jobs')
end

-- Scores are compared exactly: a spread of one rounding error is a signal, an epsilon would invent none.
function fill(group, member, claim, score)
  local key = P .. 'g:' .. group
  call('ZREM', FREE, 'g:' .. group .. '|' .. member)
  call('HSET', key, 'c:' .. member, claim)
  local range = call('HMGET', key, 'lo', 'hi')
  local lo, hi = range[1] or score, range[2] or score
  if tonumber(score) < tonumber(lo) then lo = score end
  if tonumber(score) > tonumber(hi) then hi = score end
  call('HSET', key, 'lo', lo, 'hi', hi)
  if call('HINCRBY', key, 'n', 1) < G then return end
  if M.filter_uniform == '1' and tonumber(lo) == tonumber(hi) then
    discard(group, 'discarded_uniform')
  else
    advance()
  end
end

local function add_trained(group, sign)
  local facts = call('HMGET', P .. 'g:' .. group, 'eps', 'len', 'succ')
  local episodes, steps, successes = tonumber(facts[1] or 0), tonumber(facts[2] or 0), tonumber(facts[3] or 0)
  count('trained', sign)
  count('trained_episodes', sign * episodes)
  count('trained_steps', sign * steps)
  sum('trained_success', sign * successes)
  sum('trained_length', sign * steps)
end

-- Staleness: the learner's update number at the start of the update minus that of the oldest weights. Weights of
-- updates that a crash rolled back count as the update itself.
local function record_trained(group, update)
  local key = P .. 'g:' .. group
  call('ZREM', LIVE, group)
  call('ZADD', TRAINED, update, group)
  call('ZADD', EVICTABLE, update, group)
  add_trained(group, 1)
  local oldest = call('HGET', key, 'w')
  if oldest then
    local stale = int(math.max(0, tonumber(update) - 1 - tonumber(oldest)))
    call('HSET', key, 'st', stale)
    call('HINCRBY', STALENESS, stale, 1)
  end
end

local function untrain(group)
  add_trained(group, -1)
  local stale = call('HGET', P .. 'g:' .. group, 'st')
  if stale then
    call('HINCRBY', STALENESS, stale, -1)
    call('HDEL', P .. 'g:' .. group, 'st')
  end
  call('ZREM', TRAINED, group)
  call('ZREM', EVICTABLE, group)
end

-- Takes a leased group out of training and keeps it, with the reason, for a person to look at.
local function bury(group, reason)
  local letter = call('XADD', DEAD, '*', 'group', group, 'reason', reason, 'at', int(now()))
  unstream(group)
  call('ZREM', LIVE, group)
  call('ZREM', READY, group)
  call('HSET', P .. 'g:' .. group, 'dead', letter)
  call('ZADD', EVICTABLE, 0, group) -- the first bytes to go under memory pressure
  count('dead')
  if call('XLEN', DEAD) > DEAD_LETTERS then
    local oldest = call('XRANGE', DEAD, '-', '+', 'COUNT', 1)[1]
    call('XDEL', DEAD, oldest[1])
    forget(oldest[2][2])
    count('lost')
  end
  wake('jobs')
end

-- Puts these groups (ascending) into the stream anew, for a stream that was trimmed or deleted by someone else.
local function restream(groups)
  redis.pcall('XGROUP', 'CREATE', STREAM, LEARNERS, '0', 'MKSTREAM') -- an existing group is fine
  -- All out first: in a stream made anew within the same millisecond, a new entry can have another's old number.
  for _, group in ipairs(groups) do unstream(group) end
  for _, group in ipairs(groups) do stream(group) end
  count('restreamed', #groups)
end
