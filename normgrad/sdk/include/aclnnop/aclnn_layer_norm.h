/* LayerNorm, with the statistics that its backward pass needs. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_LAYER_NORM_H
#define NORMGRAD_ACLNN_LAYER_NORM_H

#include "aclnn/aclnn_base.h"
#include "aclnnop/aclnn_util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans: checks the call, writes the bytes of workspace and the executor that the run needs. */
ACLNN_API aclnnStatus aclnnLayerNormGetWorkspaceSize(
    const aclTensor *input, const aclIntArray *normalizedShape, const aclTensor *weightOptional,
    const aclTensor *biasOptional, double eps, aclTensor *out, aclTensor *meanOutOptional,
    aclTensor *rstdOutOptional, uint64_t *workspaceSize, aclOpExecutor **executor);

/* Runs the executor on the stream; returns before the work is done. */
ACLNN_API aclnnStatus aclnnLayerNorm(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
