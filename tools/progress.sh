#!/bin/sh
# Run a command that compiles kvmnn, and say meanwhile how far it is: progress.sh COMMAND...
# On a terminal one line that changes; elsewhere a line for each quarter of the files.
total=$(find pyx \( -name '*.pyx' -o -name '*.c' \) -not -path '*/selftest/*' | wc -l)
begin=$(date +%s)
"$@" &
pid=$!
trap 'kill $pid 2>/dev/null' INT TERM
shown=0
while kill -0 $pid 2>/dev/null; do
    sleep 1
    compiled=$(find build -name '*.o' -newermt "@$begin" 2>/dev/null | wc -l)
    if [ -t 1 ]; then
        printf '\r  %s of about %s files compiled, %s s ' "$compiled" "$total" $(($(date +%s) - begin))
    elif [ $((compiled * 4 / total)) -gt $shown ]; then
        shown=$((compiled * 4 / total))
        echo "  $compiled of about $total files compiled, $(($(date +%s) - begin)) s"
    fi
done
[ -t 1 ] && printf '\r%60s\r' ''
wait $pid
