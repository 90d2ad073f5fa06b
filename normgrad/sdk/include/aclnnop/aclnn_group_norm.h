/* GroupNorm, with the statistics that its backward pass needs. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_GROUP_NORM_H
#define NORMGRAD_ACLNN_GROUP_NORM_H

#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans: checks the call, writes the bytes of workspace and the executor that the run needs. */
ACLNN_API aclnnStatus aclnnGroupNormGetWorkspaceSize(
    const aclTensor *self, const aclTensor *gamma, const aclTensor *beta, int64_t N, int64_t C, int64_t HxW,
    int64_t group, double eps, aclTensor *out, aclTensor *meanOut, aclTensor *rstdOut,
    uint64_t *workspaceSize, aclOpExecutor **executor);

/* Runs the executor on the stream; returns before the work is done. */
ACLNN_API aclnnStatus aclnnGroupNorm(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
