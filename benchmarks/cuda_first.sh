#!/bin/bash
for op in layer_norm_backward layer_norm group_norm_backward group_norm batch_norm; do
  (timeout -k 5 120 python3 benchmarks/cuda_check.py $op > $OUT/check_$op.log 2>&1; echo "$op rc $?" >> $OUT/check_$op.log) &
done; wait; for f in $OUT/check_*.log; do tr '\r' '\n' < $f | grep -v ^checks > $f.2; tr '\r' '\n' < $f | grep  ^checks | tail -1 >> $f.2; mv $f.2 $f; cut -c1-250 $f | tail -6; done; date
cat $OUT/check_*.log > $OUT/checks.log; rm $OUT/check_*
timeout -k 5 220 python3 benchmarks/cuda.py compile > $OUT/bench.log 2>&1; date
for tool in memcheck racecheck; do
timeout -k 5 75 compute-sanitizer --tool $tool python3 benchmarks/cuda_check.py small > $OUT/$tool.log 2>&1; echo "$tool rc $?"; tr '\r' '\n' < $OUT/$tool.log | grep -v ^checks | tail -5; tr '\r' '\n' < $OUT/$tool.log | grep -c ^checks;  date; done
