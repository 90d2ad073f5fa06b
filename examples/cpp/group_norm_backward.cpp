// The gradients of GroupNorm for two samples of three channels, all in one group.
#include "aclnnop/aclnn_group_norm_backward.h"

#include "common.h"

int main()
{
    Session session;
    const std::vector<float> values = counting(1, 24);
    DeviceTensor gradOut({2, 3, 4}, values), input({2, 3, 4}, values);
    DeviceTensor mean({2, 1}, {6.5f, 18.5f}), rstd({2, 1}, {0.2896827f, 0.2896827f});
    DeviceTensor gamma({3}, {1, 1, 1});
    DeviceTensor gradInput({2, 3, 4}), gradGamma({3}), gradBeta({3});
    const std::array<bool, 3> wanted = {{true, true, true}};
    aclBoolArray *outputMask = aclCreateBoolArray(wanted.data(), wanted.size());

    execute(
        [&](uint64_t *size, aclOpExecutor **executor) {
            return aclnnGroupNormBackwardGetWorkspaceSize(
                gradOut.get(), input.get(), mean.get(), rstd.get(), gamma.get(), 2, 3, 4, 1, outputMask,
                gradInput.get(), gradGamma.get(), gradBeta.get(), size, executor);
        },
        aclnnGroupNormBackward, session.stream());

    float largest = 0; // the input is its own gradient here, so what remains of it is rounding
    for (float value : gradInput.values())
        largest = std::max(largest, value < 0 ? -value : value);
    std::printf("gradInput: %s\n", largest < 1e-5f ? "below 1e-5" : "too large");
    print("gradGamma", gradGamma);
    print("gradBeta", gradBeta);
    aclDestroyBoolArray(outputMask);
    return 0;
}
