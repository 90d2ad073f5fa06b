/* The statistics of each channel on one rank: the first step of synchronised BatchNorm. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_BATCH_NORM_STATS_H
#define NORMGRAD_ACLNN_BATCH_NORM_STATS_H

#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans: checks the call, writes the bytes of workspace and the executor that the run needs. */
ACLNN_API aclnnStatus aclnnBatchNormStatsGetWorkspaceSize(
    const aclTensor *input, double eps, aclTensor *mean, aclTensor *invstd, uint64_t *workspaceSize,
    aclOpExecutor **executor);

/* Runs the executor on the stream; returns before the work is done. */
ACLNN_API aclnnStatus aclnnBatchNormStats(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
