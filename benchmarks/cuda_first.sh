#!/bin/bash
cat > /tmp/t.py <<'P'
import sys; sys.path.insert(0,"benchmarks")
from cuda_cases import *
case=Case("layer_norm_backward",(64,16384),"float32"); made=tensors(case); plan=planned(case,made,outputs(case,made)); plan.run(); torch.cuda.synchronize(); print("cooperative and dependent: works")
g=torch.cuda.CUDAGraph(); s=torch.cuda.Stream()
w=torch.empty(plan.workspace_size,dtype=torch.uint8,device="cuda")
with torch.cuda.graph(g,stream=s): plan.run(workspace=w)
g.replay(); torch.cuda.synchronize(); print("and in a graph")
P
timeout 60 python3 /tmp/t.py 2>&1 | tail -2 | cut -c1-300
timeout 60 python3 /tmp/t.py >/dev/null 2>&1 || { sed -i 's/^FOLLOWS = True/FOLLOWS = False/' normgrad/cuda/teams.py; echo FOLLOWS off; timeout 60 python3 /tmp/t.py 2>&1 | tail -3; }
for op in layer_norm_backward layer_norm group_norm_backward group_norm batch_norm; do
  (timeout -k 5 120 python3 benchmarks/cuda_check.py $op > $OUT/check_$op.log 2>&1; echo "$op rc $?" >> $OUT/check_$op.log) &
done; wait; for f in $OUT/check_*.log; do tr '\r' '\n' < $f | grep -v ^checks > $f.2; tr '\r' '\n' < $f | grep  ^checks | tail -1 >> $f.2; mv $f.2 $f; cut -c1-250 $f | tail -6; done; date
cat $OUT/check_*.log > $OUT/checks.log; rm $OUT/check_*
timeout -k 5 150 python3 benchmarks/cuda_tune.py rows > $OUT/tune_rows.log 2>&1; mv $OUT/tune.csv $OUT/tune_rows.csv; date
timeout -k 5 150 python3 benchmarks/cuda_tune.py groups > $OUT/tune_groups.log 2>&1; mv $OUT/tune.csv $OUT/tune_groups.csv;  date
timeout -k 5 100 python3 benchmarks/cuda.py > $OUT/bench.log 2>&1; date; grep -v "^(\|^  " $OUT/tune_rows.log | head -5; tail -100 $OUT/bench.log
