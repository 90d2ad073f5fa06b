#!/bin/bash
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; which gcc
for op in layer_norm_backward layer_norm group_norm_backward group_norm batch_norm; do
  (timeout -k 5 150 python3 benchmarks/cuda_check.py $op > $OUT/check_$op.log 2>&1; echo "$op rc $?" >> $OUT/check_$op.log) &
done; wait; for f in $OUT/check_*.log; do tr '\r' '\n' < $f | grep -v ^checks > $f.2; tr '\r' '\n' < $f | grep  ^checks | tail -1 >> $f.2; mv $f.2 $f; echo == $f; cut -c1-300 $f | head -8;  tail -3 $f | cut -c1-200; done; date
cat $OUT/check_*.log > $OUT/checks.log; rm $OUT/check_*
timeout -k 5 170 python3 benchmarks/cuda_tune.py rows > $OUT/tune_rows.log 2>&1; mv $OUT/tune.csv $OUT/tune_rows.csv; cat $OUT/tune_rows.log | cut -c1-150; date
timeout -k 5 170 python3 benchmarks/cuda_tune.py groups > $OUT/tune_groups.log 2>&1; mv $OUT/tune.csv $OUT/tune_groups.csv; cat $OUT/tune_groups.log | cut -c1-150; date
