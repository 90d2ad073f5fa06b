/* The last step of synchronised BatchNorm: the normalised data. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_BATCH_NORM_ELEMT_H
#define NORMGRAD_ACLNN_BATCH_NORM_ELEMT_H

#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans: checks the call, writes the bytes of workspace and the executor that the run needs. */
ACLNN_API aclnnStatus aclnnBatchNormElemtGetWorkspaceSize(
    const aclTensor *input, const aclTensor *weight, const aclTensor *bias, aclTensor *mean,
    aclTensor *invstd, double eps, aclTensor *output, uint64_t *workspaceSize, aclOpExecutor **executor);

/* Runs the executor on the stream; returns before the work is done. */
ACLNN_API aclnnStatus aclnnBatchNormElemt(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
