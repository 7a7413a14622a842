-- ARGV: 2 limit.
if not M.epoch then return { 'NO_RUN' } end
local letters = {}
for _, entry in ipairs(call('XRANGE', DEAD, '-', '+', 'COUNT', ARGV[2])) do
  local fields = entry[2]
  letters[#letters + 1] = { entry[1], fields[2], fields[4], int(now() - tonumber(fields[6])) }
end
return { 'OK', letters }
