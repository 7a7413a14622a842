-- ARGV: 2 worker, 3 update of its weights or -1, 4 jobs wanted, 5 request id, 6 "1" if memory is short.
local worker, held, wanted, request = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
if not M.epoch then return { 'NO_RUN' } end
expire()
seen(worker)

local update, staleness = tonumber(M.update), tonumber(M.staleness)
local weights = math.min(held, update) -- weights of a rolled-back update count as the newest

-- The admission rule: every group granted on weights w is trained within `staleness` updates of them.
local function admissible(rank, w)
  return update * B + rank < math.min((staleness + w + 1) * B, tonumber(M.total_updates) * B)
end

local jobs = {}
local function grant(job)
  local unit, member = split(job)
  local key = P .. unit
  if group_of(unit) then
    local facts = call('HMGET', key, 'a:' .. member, 'task', 'start')
    jobs[#jobs + 1] = { unit, member, facts[1], facts[2], facts[3] or '', '', '' }
  else
    local facts = call('HMGET', key, 'a:' .. member, 'task:' .. member, 'seed:' .. member, 'version')
    jobs[#jobs + 1] = { unit, member, facts[1], facts[2], '', facts[3], facts[4] }
  end
end

-- The same request again: its reply was lost, so repeat it.
local holds = call('HGETALL', P .. 'w:' .. worker)
for i = 1, #holds, 2 do
  if holds[i + 1] == request then grant(holds[i]) end
end

local reason = ''
if #jobs == 0 then
  while #jobs < wanted do
    local job = call('ZRANGE', FREE_EVAL, 0, 0)[1]
    if not job then break end
    call('ZREM', FREE_EVAL, job)
    assign(job, worker, request)
    grant(job)
  end
  if #jobs == 0 and M.finished == '1' then reason = 'finished' end
  while #jobs < wanted and M.finished ~= '1' do
    local job = call('ZRANGE', FREE, 0, 0)[1]
    local rank
    if job then
      rank = call('ZRANK', LIVE, group_of(split(job)))
    else
      rank = call('ZCARD', LIVE)
    end
    if not admissible(rank, update) then
      reason = 'admission'
      break
    elseif held < 0 or not admissible(rank, weights) then
      reason = 'weights'
      break
    elseif ARGV[6] == '1' then
      reason = 'memory'
      break
    end
    if job then
      call('ZREM', FREE, job)
      assign(job, worker, request)
      grant(job)
    else
      admit()
    end
  end
end
return {
  'OK', reason, call('ZRANK', ARRIVALS, worker), call('ZCARD', ARRIVALS), M.update,
  M.seed_base, M.end_on_success, jobs,
}
