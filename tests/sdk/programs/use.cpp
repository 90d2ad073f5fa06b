// Tensors, arrays and executors in ordinary and in wrong use, checked.
#include "checks.h"

namespace {

// LayerNorm backward of two rows of two elements whose result is known.
struct Known {
    explicit Known(bool addressed = true)
        : data({2, 3, 4, 5}), mean({2, 3}), rstd({4, 5}), result({0, 0, 0, 0}),
          input(own(addressed ? data.tensor({2, 2}) : unaddressed({2, 2}))), meanTensor(own(mean.tensor({2, 1}))),
          rstdTensor(own(rstd.tensor({2, 1}))), output(own(addressed ? result.tensor({2, 2}) : unaddressed({2, 2})))
    {
    }
    static aclTensor *unaddressed(const Shape &shape)
    {
        return aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape.data(),
                               shape.size(), nullptr);
    }
    aclnnStatus plan()
    {
        const int64_t shape = 2;
        const bool wanted[] = {true, false, false};
        aclIntArray *normalized = aclCreateIntArray(&shape, 1);
        aclBoolArray *mask = aclCreateBoolArray(wanted, 3);
        const aclnnStatus status = aclnnLayerNormBackwardGetWorkspaceSize(
            input.get(), input.get(), normalized, meanTensor.get(), rstdTensor.get(), nullptr, nullptr, mask,
            output.get(), nullptr, nullptr, &size, &executor);
        aclDestroyIntArray(normalized);
        aclDestroyBoolArray(mask);
        if (status == 0 && size > 0 && !workspace)
            WORKS(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_NORMAL_ONLY));
        return status;
    }
    aclnnStatus run(aclrtStream stream = nullptr) { return aclnnLayerNormBackward(workspace, size, executor, stream); }
    ~Known()
    {
        if (workspace)
            aclrtFree(workspace);
    }
    Known(const Known &) = delete;
    Known &operator=(const Known &) = delete;

    Block data, mean, rstd, result;
    Tensor input, meanTensor, rstdTensor, output;
    uint64_t size = 0;
    aclOpExecutor *executor; // not initialised: only written
    void *workspace = nullptr;
};
const std::vector<float> RIGHT = {-2, -94, -877.5f, -1747.5f};

void executors()
{
    Known once;
    WORKS(once.plan());
    WORKS(once.run());
    WORKS(aclrtSynchronizeStream(nullptr));
    REQUIRE(once.result.values() == RIGHT);
    FAILS(once.run(), 161002);
    FAILS(aclSetAclOpExecutorRepeatable(once.executor), 161002);
    FAILS(aclDestroyAclOpExecutor(once.executor), 161002);
    FAILS(aclSetAclOpExecutorRepeatable(nullptr), 561103);
    FAILS(aclDestroyAclOpExecutor(nullptr), 561103);

    Known often;
    WORKS(often.plan());
    WORKS(aclSetAclOpExecutorRepeatable(often.executor));
    for (int i = 0; i < 3; i++)
        WORKS(often.run());
    Block other({4, 5, 2, 3}), elsewhere({0, 0, 0, 0}), means({3, 2}), stds({5, 4});
    WORKS(aclSetInputTensorAddr(often.executor, 0, often.input.get(), other.data));
    WORKS(aclSetTensorAddr(often.executor, 1, often.input.get(), other.data));
    WORKS(aclSetInputTensorAddr(often.executor, 2, often.meanTensor.get(), means.data));
    WORKS(aclSetInputTensorAddr(often.executor, 3, often.rstdTensor.get(), stds.data));
    WORKS(aclSetOutputTensorAddr(often.executor, 0, often.output.get(), elsewhere.data));
    WORKS(often.run());
    WORKS(aclrtSynchronizeStream(nullptr));
    REQUIRE(often.result.values() == RIGHT);
    REQUIRE((elsewhere.values() == std::vector<float>{-877.5f, -1747.5f, -2, -94}));
    FAILS(aclSetInputTensorAddr(often.executor, 6, often.input.get(), other.data), 161002);
    FAILS(aclSetInputTensorAddr(often.executor, 4, often.input.get(), other.data), 161002); // weight: absent
    FAILS(aclSetOutputTensorAddr(often.executor, 3, often.input.get(), other.data), 161002);
    FAILS(aclSetTensorAddr(often.executor, 0, nullptr, other.data), 561103);
    FAILS(aclSetTensorAddr(nullptr, 0, often.input.get(), other.data), 561103);
    FAILS(aclSetTensorAddr(often.executor, 0, often.meanTensor.get(), other.data), 161002); // another layout
    FAILS(aclSetTensorAddr(often.executor, 0, often.input.get(), &failures), 161002);       // not ours
    WORKS(aclDestroyAclOpExecutor(often.executor));
    FAILS(often.run(), 161002);

    Known later(false);
    WORKS(later.plan());
    WORKS(aclSetAclOpExecutorRepeatable(later.executor));
    FAILS(later.run(), 161002);
    WORKS(aclSetInputTensorAddr(later.executor, 0, later.input.get(), later.data.data));
    WORKS(aclSetInputTensorAddr(later.executor, 1, later.input.get(), later.data.data));
    WORKS(aclSetOutputTensorAddr(later.executor, 0, later.output.get(), later.result.data));
    WORKS(later.run());
    WORKS(aclrtSynchronizeStream(nullptr));
    REQUIRE(later.result.values() == RIGHT);
    WORKS(aclDestroyAclOpExecutor(later.executor));

    FAILS(aclnnGroupNormBackward(nullptr, 0, nullptr, nullptr), 161001);
    Known wrong;
    WORKS(wrong.plan());
    FAILS(aclnnGroupNormBackward(wrong.workspace, wrong.size, wrong.executor, nullptr), 161002);
    WORKS(wrong.run());
    WORKS(aclrtSynchronizeDevice());
}

// Memory freed and tensors destroyed while the work that uses them may still be under way.
void freedInFlight()
{
    const int64_t shape[] = {64, 256}, row = 256;
    const bool wanted[] = {true, true, true};
    for (int round = 0; round < 20; round++) {
        std::vector<void *> blocks;
        const auto make = [&](const int64_t *dims, uint64_t rank, size_t bytes) {
            void *data = nullptr;
            WORKS(aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
            WORKS(aclrtMemset(data, bytes, 0, bytes));
            blocks.push_back(data);
            return own(aclCreateTensor(dims, rank, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, rank, data));
        };
        const int64_t statistics[] = {64, 1};
        Tensor input = make(shape, 2, 64 * 256 * 4), output = make(shape, 2, 64 * 256 * 4);
        Tensor mean = make(statistics, 2, 256), rstd = make(statistics, 2, 256);
        Tensor weight = make(&row, 1, 1024), gradWeight = make(&row, 1, 1024), gradBias = make(&row, 1, 1024);
        std::unique_ptr<aclIntArray, aclnnStatus (*)(const aclIntArray *)> normalized(aclCreateIntArray(&row, 1),
                                                                                      aclDestroyIntArray);
        std::unique_ptr<aclBoolArray, aclnnStatus (*)(const aclBoolArray *)> mask(aclCreateBoolArray(wanted, 3),
                                                                                  aclDestroyBoolArray);
        uint64_t size = 0;
        aclOpExecutor *executor = nullptr;
        WORKS(aclnnLayerNormBackwardGetWorkspaceSize(input.get(), input.get(), normalized.get(), mean.get(), rstd.get(),
                                                     weight.get(), nullptr, mask.get(), output.get(), gradWeight.get(),
                                                     gradBias.get(), &size, &executor));
        void *workspace = nullptr;
        if (size > 0) {
            WORKS(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST));
            blocks.push_back(workspace);
        }
        WORKS(aclnnLayerNormBackward(workspace, size, executor, nullptr));
        for (void *block : blocks)
            WORKS(aclrtFree(block));
    }
    WORKS(aclrtSynchronizeDevice());
}

void handles()
{
    Block block({0, 1, 2, 3, 4, 5});
    aclTensor *tensor = block.tensor({2, 2}, {1, 3}, 1);
    int64_t *dims = nullptr;
    uint64_t count = 0;
    WORKS(aclGetViewShape(tensor, &dims, &count));
    REQUIRE(count == 2 && dims[0] == 2 && dims[1] == 2);
    delete[] dims;
    WORKS(aclGetViewStrides(tensor, &dims, &count));
    REQUIRE(count == 2 && dims[0] == 1 && dims[1] == 3);
    delete[] dims;
    WORKS(aclGetStorageShape(tensor, &dims, &count));
    REQUIRE(count == 1 && dims[0] == 6);
    delete[] dims;
    int64_t offset = 0;
    aclFormat format;
    aclDataType type;
    void *address = nullptr;
    WORKS(aclGetViewOffset(tensor, &offset));
    WORKS(aclGetFormat(tensor, &format));
    WORKS(aclGetDataType(tensor, &type));
    WORKS(aclGetRawTensorAddr(tensor, &address));
    REQUIRE(offset == 1 && format == ACL_FORMAT_ND && type == ACL_FLOAT && address == block.data);
    WORKS(aclSetRawTensorAddr(tensor, nullptr));
    WORKS(aclGetRawTensorAddr(tensor, &address));
    REQUIRE(address == nullptr);
    FAILS(aclGetViewShape(nullptr, &dims, &count), 161001);
    FAILS(aclGetViewShape(tensor, nullptr, &count), 161001);
    FAILS(aclGetViewShape(tensor, &dims, nullptr), 161001);
    FAILS(aclGetViewOffset(tensor, nullptr), 161001);
    FAILS(aclDestroyScalar(reinterpret_cast<aclScalar *>(tensor)), 161002);
    WORKS(aclDestroyTensor(tensor));
    FAILS(aclDestroyTensor(tensor), 161002);
    FAILS(aclGetFormat(tensor, &format), 161002);
    WORKS(aclDestroyTensor(nullptr));

    const int64_t huge[] = {0, int64_t(1) << 62, int64_t(1) << 62}; // contiguous strides of 2^124
    aclTensor *empty = aclCreateTensor(huge, 3, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, huge, 3, nullptr);
    WORKS(aclGetViewStrides(empty, &dims, &count));
    REQUIRE(count == 3 && dims[0] == INT64_MAX && dims[1] == huge[1] && dims[2] == 1);
    delete[] dims;
    WORKS(aclDestroyTensor(empty));

    const int64_t numbers[] = {1, 2, 3};
    const float reals[] = {1, 2};
    const bool flags[] = {true};
    aclIntArray *ints = aclCreateIntArray(numbers, 3);
    aclFloatArray *floats = aclCreateFloatArray(reals, 2);
    aclBoolArray *bools = aclCreateBoolArray(flags, 1);
    WORKS(aclGetIntArraySize(ints, &count));
    REQUIRE(count == 3);
    WORKS(aclGetFloatArraySize(floats, &count));
    REQUIRE(count == 2);
    WORKS(aclGetBoolArraySize(bools, &count));
    REQUIRE(count == 1);
    FAILS(aclGetIntArraySize(nullptr, &count), 161001);
    FAILS(aclGetIntArraySize(reinterpret_cast<aclIntArray *>(floats), &count), 161002);
    WORKS(aclDestroyIntArray(ints));
    WORKS(aclDestroyFloatArray(floats)); // bools are never destroyed: programs do that

    const aclTensor *elements[] = {block.tensor({6}), block.tensor({6})};
    aclTensorList *list = aclCreateTensorList(elements, 2);
    WORKS(aclGetTensorListSize(list, &count));
    REQUIRE(count == 2);
    WORKS(aclDestroyTensorList(list));
    FAILS(aclDestroyTensor(elements[0]), 161002); // went with the list
    REQUIRE(aclCreateTensorList(elements, 2) == nullptr && aclGetRecentErrMsg() != nullptr);
    double number = 1.5;
    const aclScalar *scalars[] = {aclCreateScalar(&number, ACL_DOUBLE)};
    aclScalarList *scalarList = aclCreateScalarList(scalars, 1);
    WORKS(aclGetScalarListSize(scalarList, &count));
    REQUIRE(count == 1);
    WORKS(aclDestroyScalarList(scalarList));
    REQUIRE(aclCreateScalar(nullptr, ACL_FLOAT) == nullptr && aclGetRecentErrMsg() != nullptr);
    REQUIRE(aclCreateTensor(nullptr, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr) == nullptr);
    REQUIRE(aclCreateTensor(numbers, 3, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 1, nullptr) == nullptr);
    REQUIRE(aclGetRecentErrMsg() != nullptr && aclGetRecentErrMsg() == nullptr);
    aclTensor *scalar = aclCreateTensor(nullptr, 0, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr);
    REQUIRE(scalar != nullptr);
    WORKS(aclGetViewShape(scalar, &dims, &count));
    REQUIRE(count == 0);
    delete[] dims;
    WORKS(aclDestroyTensor(scalar));
}

} // namespace

int main()
{
    WORKS(aclInit(nullptr));
    WORKS(aclnnInit(nullptr));
    WORKS(aclrtSetDevice(0));
    handles();
    executors();
    freedInFlight();
    WORKS(aclnnFinalize());
    Known late; // freed after the end, as programs' destructors do
    WORKS(late.plan());
    WORKS(aclrtResetDevice(0));
    WORKS(aclFinalize());
    std::printf("%d failed\n", failures.load());
    return failures ? 1 : 0;
}
