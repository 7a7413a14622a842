-- ARGV: 2 name.
if not M.epoch then return { 'NO_RUN' } end
local key = P .. 'e:' .. ARGV[2]
local head = call('HMGET', key, 'version', 'total', 'n')
if not head[1] then return { 'MISSING', 'there is no evaluation ' .. ARGV[2] } end
local results = {}
if tonumber(head[3]) > 0 then
  for number = 1, tonumber(head[2]) do
    local facts = call('HMGET', key, 'c:' .. number, 'z:' .. number, 'task:' .. number, 'seed:' .. number)
    if facts[1] or facts[2] then
      results[#results + 1] = { number, facts[1] or '', facts[2] or '', facts[3], facts[4] }
    end
  end
end
return { 'OK', head[1], head[2], results }
