if not M.epoch then return { 'NO_RUN' } end
return { 'OK', call('GET', SPEC), M.epoch, M.update, M.finished }
