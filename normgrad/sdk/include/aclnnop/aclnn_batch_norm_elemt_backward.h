/* The last step of synchronised BatchNorm's backward pass: the gradient of the input. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_BATCH_NORM_ELEMT_BACKWARD_H
#define NORMGRAD_ACLNN_BATCH_NORM_ELEMT_BACKWARD_H

#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans: checks the call, writes the bytes of workspace and the executor that the run needs. */
ACLNN_API aclnnStatus aclnnBatchNormElemtBackwardGetWorkspaceSize(
    const aclTensor *gradOut, const aclTensor *input, const aclTensor *mean, const aclTensor *invstd,
    const aclTensor *weight, const aclTensor *sumDy, const aclTensor *sumDyXmu, aclTensor *counter,
    aclTensor *gradInput, uint64_t *workspaceSize, aclOpExecutor **executor);

/* Runs the executor on the stream; returns before the work is done. */
ACLNN_API aclnnStatus aclnnBatchNormElemtBackward(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
