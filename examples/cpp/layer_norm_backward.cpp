// The gradients of LayerNorm for two rows of two elements.
#include "aclnnop/aclnn_layer_norm_backward.h"

#include "common.h"

int main()
{
    Session session;
    DeviceTensor gradOut({2, 2}, {2, 3, 4, 5}), input({2, 2}, {2, 3, 4, 5});
    DeviceTensor mean({2, 1}, {2, 3}), rstd({2, 1}, {4, 5});
    DeviceTensor weight({2}, {1, 1}), bias({2}, {1, 1});
    DeviceTensor gradInput({2, 2}), gradWeight({2}), gradBias({2});
    const int64_t normalized[] = {2};
    const bool wanted[] = {true, true, true};
    aclIntArray *normalizedShape = aclCreateIntArray(normalized, 1);
    aclBoolArray *outputMask = aclCreateBoolArray(wanted, 3);

    execute(
        [&](uint64_t *size, aclOpExecutor **executor) {
            return aclnnLayerNormBackwardGetWorkspaceSize(
                gradOut.get(), input.get(), normalizedShape, mean.get(), rstd.get(), weight.get(), bias.get(),
                outputMask, gradInput.get(), gradWeight.get(), gradBias.get(), size, executor);
        },
        aclnnLayerNormBackward, session.stream());

    print("gradInput", gradInput);
    print("gradWeight", gradWeight);
    print("gradBias", gradBias);
    aclDestroyIntArray(normalizedShape);
    aclDestroyBoolArray(outputMask);
    return 0;
}
