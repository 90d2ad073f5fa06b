/* The gradients of LayerNorm. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_LAYER_NORM_BACKWARD_H
#define NORMGRAD_ACLNN_LAYER_NORM_BACKWARD_H

#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans: checks the call, writes the bytes of workspace and the executor that the run needs. */
ACLNN_API aclnnStatus aclnnLayerNormBackwardGetWorkspaceSize(
    const aclTensor *gradOut, const aclTensor *input, const aclIntArray *normalizedShape,
    const aclTensor *mean, const aclTensor *rstd, const aclTensor *weightOptional,
    const aclTensor *biasOptional, const aclBoolArray *outputMask, aclTensor *gradInputOut,
    aclTensor *gradWeightOut, aclTensor *gradBiasOut, uint64_t *workspaceSize, aclOpExecutor **executor);

/* Runs the executor on the stream; returns before the work is done. */
ACLNN_API aclnnStatus aclnnLayerNormBackward(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
