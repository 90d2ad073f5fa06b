// The last step of synchronised BatchNorm's backward pass, for two ranks of five elements per channel.
#include "aclnnop/aclnn_batch_norm_elemt_backward.h"

#include "common.h"

int main()
{
    Session session;
    const std::vector<float> values = counting(0, 8);
    const int32_t counts[] = {5, 5};
    DeviceTensor gradOut({1, 2, 4}, values), input({1, 2, 4}, values);
    DeviceTensor mean({2}, {0, 0}), invstd({2}, {1, 1}), weight({2}, {1, 1});
    DeviceTensor sumDy({2}, {0, 0}), sumDyXmu({2}, {1, 1}), counter({2}, ACL_INT32, counts);
    DeviceTensor gradInput({1, 2, 4});

    execute(
        [&](uint64_t *size, aclOpExecutor **executor) {
            return aclnnBatchNormElemtBackwardGetWorkspaceSize(
                gradOut.get(), input.get(), mean.get(), invstd.get(), weight.get(), sumDy.get(), sumDyXmu.get(),
                counter.get(), gradInput.get(), size, executor);
        },
        aclnnBatchNormElemtBackward, session.stream());

    print("gradInput", gradInput);
    return 0;
}
