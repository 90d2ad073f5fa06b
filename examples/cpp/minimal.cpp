// One whole program: the gradients of LayerNorm for two rows of two elements, then a call that is wrong on purpose.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_layer_norm_backward.h"

#define CHECK(call)                                                      \
    do {                                                                 \
        int status = (call);                                             \
        if (status != 0) {                                               \
            std::printf("%s: %d\n%s\n", #call, status, aclGetRecentErrMsg()); \
            std::exit(1);                                                \
        }                                                                \
    } while (0)

// Device memory with these values, and a contiguous float32 tensor over it.
aclTensor *makeTensor(const std::vector<int64_t> &shape, const std::vector<float> &values, void **memory)
{
    size_t bytes = values.size() * sizeof(float);
    CHECK(aclrtMalloc(memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMemcpy(*memory, bytes, values.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    return aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape.data(),
                           shape.size(), *memory);
}

void print(const char *name, void *memory, size_t count)
{
    std::vector<float> values(count);
    CHECK(aclrtMemcpy(values.data(), count * sizeof(float), memory, count * sizeof(float),
                      ACL_MEMCPY_DEVICE_TO_HOST));
    std::printf("%s:", name);
    for (float value : values)
        std::printf(" %g", value);
    std::printf("\n");
}

int main()
{
    aclrtStream stream = nullptr;
    CHECK(aclInit(nullptr));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));

    void *memory[8];
    aclTensor *gradOut = makeTensor({2, 2}, {2, 3, 4, 5}, &memory[0]);
    aclTensor *input = makeTensor({2, 2}, {2, 3, 4, 5}, &memory[1]);
    aclTensor *mean = makeTensor({2, 1}, {2, 3}, &memory[2]);
    aclTensor *rstd = makeTensor({2, 1}, {4, 5}, &memory[3]);
    aclTensor *weight = makeTensor({2}, {1, 1}, &memory[4]);
    aclTensor *gradInput = makeTensor({2, 2}, {0, 0, 0, 0}, &memory[5]);
    aclTensor *gradWeight = makeTensor({2}, {0, 0}, &memory[6]);
    aclTensor *gradBias = makeTensor({2}, {0, 0}, &memory[7]);
    const int64_t sizes[] = {2};
    const bool requested[] = {true, true, true};
    aclIntArray *normalizedShape = aclCreateIntArray(sizes, 1);
    aclBoolArray *outputMask = aclCreateBoolArray(requested, 3);

    // Phase 1, the plan: checks the call and returns the size of the workspace.
    uint64_t workspaceSize = 0;
    aclOpExecutor *executor = nullptr;
    CHECK(aclnnLayerNormBackwardGetWorkspaceSize(gradOut, input, normalizedShape, mean, rstd, weight, nullptr,
                                                 outputMask, gradInput, gradWeight, gradBias, &workspaceSize,
                                                 &executor));

    // Phase 2, the run: works on a stream, and returns before the work is done.
    void *workspace = nullptr;
    if (workspaceSize > 0)
        CHECK(aclrtMalloc(&workspace, workspaceSize, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclnnLayerNormBackward(workspace, workspaceSize, executor, stream));
    CHECK(aclrtSynchronizeStream(stream));
    print("gradInput", memory[5], 4);
    print("gradWeight", memory[6], 2);
    print("gradBias", memory[7], 2);

    // A wrong call: rstd is missing. The status says what kind of error it is, the text says what would be right.
    int status = aclnnLayerNormBackwardGetWorkspaceSize(gradOut, input, normalizedShape, mean, nullptr, weight,
                                                        nullptr, outputMask, gradInput, gradWeight, gradBias,
                                                        &workspaceSize, &executor);
    std::printf("status %d: %s\n", status, std::strstr(aclGetRecentErrMsg(), "aclnn"));

    for (aclTensor *tensor : {gradOut, input, mean, rstd, weight, gradInput, gradWeight, gradBias})
        aclDestroyTensor(tensor);
    for (void *address : memory)
        aclrtFree(address);
    if (workspace)
        aclrtFree(workspace);
    aclDestroyIntArray(normalizedShape);
    aclDestroyBoolArray(outputMask);
    aclrtDestroyStream(stream);
    aclrtResetDevice(0);
    aclFinalize();
    return 0;
}
