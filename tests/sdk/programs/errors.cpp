// Every documented error of the three backward operators: each row breaks one rule of a sound call, and says which
// status must come and which words its text must hold. The operator's name must be in every text.
#include "call.h"

namespace {

constexpr int NULLPTR_ERROR = ACLNN_ERR_PARAM_NULLPTR, INVALID = ACLNN_ERR_PARAM_INVALID;

struct Row {
    std::string name;
    std::function<void(Call &)> broken;
    int status;
    std::string text;
};
using Rows = std::vector<Row>;

int failures = 0, checked = 0;

void expect(const std::string &what, int status, int wanted, const std::string &operatorName, const std::string &words)
{
    const char *given = aclGetRecentErrMsg();
    const std::string text = given ? given : "";
    const bool told = wanted == 0 ? text.empty()
                                  : text.find(words) != std::string::npos && text.find(operatorName) != std::string::npos &&
                                        text.find("[PID:") == 0;
    checked++;
    if (status != wanted || !told) {
        failures++;
        std::printf("FAILED %s: status %d, not %d; text \"%s\" without \"%s\"\n", what.c_str(), status, wanted,
                    text.c_str(), words.c_str());
    }
    if (aclGetRecentErrMsg() != nullptr)
        failures++, std::printf("FAILED %s: the text was not forgotten\n", what.c_str());
}

void planRows(const Operator &op, const Rows &rows)
{
    for (const Row &row : rows) {
        Call call = op.sound();
        row.broken(call);
        Arguments arguments(call);
        uint64_t size = 77;
        aclOpExecutor *executor = nullptr;
        const int status = op.plan(arguments, &size, &executor);
        expect(std::string(op.name) + ", " + row.name, status, row.status, op.name, row.text);
        if (status == 0)
            aclDestroyAclOpExecutor(executor);
        else if (size != 77 || executor != nullptr)
            failures++, std::printf("FAILED %s: a failed plan wrote its results\n", row.name.c_str());
    }
}

// Rows that hold for tensors of every operator alike.
void commonRows(Rows &rows, const char *name, aclDataType refused, const char *dtypeText)
{
    const std::string n = name;
    rows.push_back({n + " of a refused dtype", [=](Call &c) { c[n.c_str()].type = refused; }, INVALID, dtypeText});
    rows.push_back({n + " of an unknown dtype", [=](Call &c) { c[n.c_str()].type = static_cast<aclDataType>(99); },
                    INVALID, n + " is of the unknown element type 99"});
    for (aclFormat format : {ACL_FORMAT_NC1HWC0, ACL_FORMAT_FRACTAL_Z, ACL_FORMAT_NC1HWC0_C04, ACL_FORMAT_FRACTAL_NZ,
                             ACL_FORMAT_NDC1HWC0, ACL_FRACTAL_Z_3D, ACL_FORMAT_FRACTAL_NZ_C0_16, ACL_FORMAT_UNDEFINED})
        rows.push_back({n + " of a private format", [=](Call &c) { c[n.c_str()].format = format; }, INVALID,
                        n + " has the format "});
    rows.push_back({n + " of rank 9", [=](Call &c) {
                        Shape &shape = c[n.c_str()].shape;
                        shape.insert(shape.begin(), 9 - shape.size(), 1);
                    },
                    INVALID, n + " has 9 dimensions"});
    rows.push_back({n + " of a negative size", [=](Call &c) { c[n.c_str()].shape[0] = -1; }, INVALID,
                    n + " has the shape (-1,"});
    rows.push_back({n + " past its storage", [=](Call &c) { c[n.c_str()].offset = 1; }, INVALID,
                    n + " reaches outside its storage"});
    rows.push_back({n + " before its storage", [=](Call &c) { c[n.c_str()].offset = -1; }, INVALID,
                    n + " reaches outside its storage"});
    rows.push_back({n + " of strides beyond 64 bits",
                    [=](Call &c) {
                        Spec &spec = c[n.c_str()];
                        spec.storage = {int64_t(1) << 62, int64_t(1) << 62};
                        spec.strides = Shape(spec.shape.size(), int64_t(1) << 62);
                    },
                    INVALID, n + " reaches over "});
    rows.push_back({n + " without memory of ours", [=](Call &c) { c[n.c_str()].wild = true; }, INVALID,
                    n + " has its storage at 0x10000"});
    rows.push_back({n + " destroyed", [=](Call &c) { c[n.c_str()].dead = true; }, INVALID,
                    "no longer alive, and must be a live aclTensor"});
}

void nullRows(Rows &rows, const std::vector<const char *> &names, const char *words)
{
    for (const char *name : names)
        rows.push_back({std::string(name) + " null", [=](Call &c) { c[name].null = true; }, NULLPTR_ERROR,
                        std::string(name) + words});
}

void shapeRows(Rows &rows, const std::vector<const char *> &names, const Shape &shape, const char *words)
{
    for (const char *name : names)
        rows.push_back({std::string(name) + " of another shape", [=](Call &c) { c[name].shape = shape; }, INVALID,
                        std::string(name) + words});
}

void dtypeRows(Rows &rows, const std::vector<const char *> &names, aclDataType type, const char *words)
{
    for (const char *name : names)
        rows.push_back({std::string(name) + " of another dtype", [=](Call &c) { c[name].type = type; }, INVALID,
                        std::string(name) + words});
}

void outputRows(Rows &rows, const char *name, int index, bool masked)
{
    const std::string n = name;
    rows.push_back({n + " that overlaps itself",
                    [=](Call &c) {
                        Spec &spec = c[n.c_str()];
                        spec.storage = spec.shape;
                        spec.strides = Shape(spec.shape.size(), 0);
                    },
                    INVALID, n + " overlaps itself"});
    if (!masked)
        return;
    const auto unwanted = [=](Call &c) -> Spec & {
        c.mask[static_cast<size_t>(index)] = 0;
        return c[n.c_str()];
    };
    rows.push_back({n + " null and not wanted", [=](Call &c) { unwanted(c).null = true; }, 0, ""});
    rows.push_back({n + " destroyed and not wanted", [=](Call &c) { unwanted(c).dead = true; }, 0, ""});
    rows.push_back({n + " nonsense and not wanted",
                    [=](Call &c) {
                        Spec &spec = unwanted(c);
                        spec.shape = {-5, 7}, spec.storage = {1}, spec.type = ACL_STRING;
                    },
                    0, ""});
}

void resultRows(Rows &rows)
{
    rows.push_back({"nothing broken", [](Call &) {}, 0, ""});
    rows.push_back({"workspaceSize null", [](Call &c) { c.nullSize = true; }, NULLPTR_ERROR, "workspaceSize is null"});
    rows.push_back({"workspaceSize wild", [](Call &c) { c.wildSize = true; }, INVALID,
                    "workspaceSize is 0x8, and must be the address of a variable"});
    rows.push_back({"executor null", [](Call &c) { c.nullExecutor = true; }, NULLPTR_ERROR, "executor is null"});
}

void maskRows(Rows &rows)
{
    rows.push_back({"outputMask null", [](Call &c) { c.nullMask = true; }, NULLPTR_ERROR, "outputMask is null"});
    for (size_t length : {size_t(0), size_t(2), size_t(4)})
        rows.push_back({"outputMask of another length", [=](Call &c) { c.mask.assign(length, 1); }, INVALID,
                        "outputMask has " + std::to_string(length) + " elements, and must have 3"});
}

Rows layerNormRows()
{
    Rows rows;
    resultRows(rows);
    maskRows(rows);
    nullRows(rows, {"gradOut", "input", "mean", "rstd"}, " is null, and must be given");
    nullRows(rows, {"gradInputOut", "gradWeightOut", "gradBiasOut"}, " is null, and is a requested output");
    rows.push_back({"normalizedShape null", [](Call &c) { c.nullNormalized = true; }, NULLPTR_ERROR,
                    "normalizedShape is null"});
    for (const char *name : {"gradOut", "input", "mean", "rstd", "weightOptional", "biasOptional", "gradInputOut",
                             "gradWeightOut", "gradBiasOut"}) {
        commonRows(rows, name, ACL_DOUBLE, (std::string(name) + " is float64, and must be ").c_str());
        rows.push_back({std::string(name) + " of rank 0",
                        [=](Call &c) {
                            c[name].shape = {};
                            c[name].storage = {1};
                        },
                        INVALID,
                        // Attributes are checked before shapes, and this one is judged by input.
                        std::string(name) == "input" ? "normalizedShape is (4,), and must equal the last dimensions"
                                                     : std::string(name) + " has 0 dimensions"});
    }
    dtypeRows(rows, {"input", "mean", "rstd", "weightOptional", "biasOptional", "gradInputOut", "gradWeightOut",
                     "gradBiasOut"}, ACL_FLOAT16, " is float16, and must be ");
    shapeRows(rows, {"input", "gradInputOut"}, {3, 2, 4}, " has the shape (3, 2, 4), and must have (2, 3, 4)");
    shapeRows(rows, {"mean"}, {2, 2, 1}, " has 4 elements (shape (2, 2, 1)), and must have 6");
    shapeRows(rows, {"rstd"}, {2, 3}, " has the shape (2, 3), and must have (2, 3, 1)");
    shapeRows(rows, {"weightOptional", "biasOptional", "gradWeightOut", "gradBiasOut"}, {5},
              " has the shape (5,), and must have (4,)");
    for (const Shape &wrong : {Shape{}, Shape{3}, Shape{3, 3}, Shape{1, 2, 3, 4}, Shape{-4}})
        rows.push_back({"normalizedShape that is not the end of input's", [=](Call &c) { c.normalized = wrong; },
                        INVALID, "normalizedShape is ("});
    outputRows(rows, "gradInputOut", 0, true);
    outputRows(rows, "gradWeightOut", 1, true);
    outputRows(rows, "gradBiasOut", 2, true);
    rows.push_back({"weight and bias absent",
                    [](Call &c) { c["weightOptional"].null = c["biasOptional"].null = true; }, 0, ""});
    return rows;
}

Rows groupNormRows()
{
    Rows rows;
    resultRows(rows);
    maskRows(rows);
    nullRows(rows, {"gradOut", "input", "mean", "rstd"}, " is null, and must be given");
    nullRows(rows, {"gradInput", "gradGammaOut", "gradBetaOut"}, " is null, and is a requested output");
    for (const char *name : {"gradOut", "input", "mean", "rstd", "gamma", "gradInput", "gradGammaOut", "gradBetaOut"})
        commonRows(rows, name, ACL_INT32, (std::string(name) + " is int32, and must be ").c_str());
    dtypeRows(rows, {"input", "mean", "rstd", "gamma", "gradInput", "gradGammaOut", "gradBetaOut"}, ACL_BF16,
              " is bfloat16, and must be ");
    shapeRows(rows, {"gradOut", "input"}, {2, 6, 4}, " has 48 elements (shape (2, 6, 4)), and must have 60");
    shapeRows(rows, {"mean", "rstd"}, {2, 2}, " has 4 elements (shape (2, 2)), and must have 6");
    shapeRows(rows, {"gamma"}, {5}, " has 5 elements (shape (5,)), and must have 6");
    shapeRows(rows, {"gradInput"}, {12, 5}, " has the shape (12, 5), and must have (2, 6, 5)");
    shapeRows(rows, {"gradGammaOut", "gradBetaOut"}, {5}, " has the shape (5,), and must have (6,)");
    const auto number = [&](const char *name, int64_t value, const std::string &text) {
        rows.push_back({std::string(name) + " = " + std::to_string(value), [=](Call &c) { c.numbers[name] = value; },
                        INVALID, text});
    };
    number("N", -1, "N is -1, and must not be negative");
    number("C", -6, "C is -6, and must not be negative");
    number("HxW", -5, "HxW is -5, and must not be negative");
    number("group", 0, "group is 0, and must be greater than 0");
    number("group", -3, "group is -3, and must be greater than 0");
    number("group", 4, "group is 4, and must divide C = 6");
    number("N", 3, "gradOut has 60 elements (shape (2, 6, 5)), and must have 90");
    number("HxW", INT64_MAX, "the product must fit in a signed 64-bit integer");
    outputRows(rows, "gradInput", 0, true);
    outputRows(rows, "gradGammaOut", 1, true);
    outputRows(rows, "gradBetaOut", 2, true);
    rows.push_back({"gamma absent", [](Call &c) { c["gamma"].null = true; }, 0, ""});
    return rows;
}

Rows batchNormRows()
{
    Rows rows;
    resultRows(rows);
    nullRows(rows, {"gradOut", "input", "mean", "invstd", "sumDy", "sumDyXmu", "counter"},
             " is null, and must be given");
    nullRows(rows, {"gradInput"}, " is null, and is a requested output");
    for (const char *name : {"gradOut", "input", "mean", "invstd", "weight", "sumDy", "sumDyXmu", "gradInput"})
        commonRows(rows, name, ACL_INT64, (std::string(name) + " is int64, and must be ").c_str());
    commonRows(rows, "counter", ACL_BF16, "counter is bfloat16, and must be int32, float16 or float32");
    for (const char *name : {"gradOut", "input", "gradInput"})
        rows.push_back({std::string(name) + " of rank 1", [=](Call &c) { c[name].shape = {24}; }, INVALID,
                        std::string(name) + " has 1 dimension "});
    for (const char *name : {"mean", "invstd", "weight", "sumDy", "sumDyXmu"})
        rows.push_back({std::string(name) + " of rank 2", [=](Call &c) { c[name].shape = {3, 1}; }, INVALID,
                        std::string(name) + " has 2 dimensions"});
    rows.push_back({"no channels",
                    [](Call &c) {
                        for (const char *name : {"gradOut", "input", "gradInput"})
                            c[name].shape = {2, 0, 4};
                    },
                    INVALID, "gradOut has the shape (2, 0, 4), and must have at least one channel"});
    shapeRows(rows, {"input", "gradInput"}, {2, 3, 5}, " has the shape (2, 3, 5), and must have (2, 3, 4)");
    shapeRows(rows, {"mean", "invstd", "weight", "sumDy", "sumDyXmu"}, {4}, " has the shape (4,), and must have (3,)");
    outputRows(rows, "gradInput", 0, false);
    rows.push_back({"weight absent", [](Call &c) { c["weight"].null = true; }, 0, ""});
    rows.push_back({"any mix of dtypes",
                    [](Call &c) {
                        c["gradOut"].type = ACL_FLOAT16, c["mean"].type = ACL_BF16, c["gradInput"].type = ACL_BF16;
                    },
                    0, ""});
    return rows;
}

// The second phase.
void runRows(const Operator &op)
{
    const std::string name = op.name;
    Arguments arguments(op.sound());
    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
    expect(name + ", plan", op.plan(arguments, &size, &executor), 0, name, "");
    expect(name + ", executor null", op.run(nullptr, 0, nullptr, nullptr), NULLPTR_ERROR, name, "executor is null");
    void *workspace = nullptr;
    aclrtMalloc(&workspace, size + 64, ACL_MEM_MALLOC_HUGE_FIRST);
    const aclrtStream wild = reinterpret_cast<aclrtStream>(0x1234);
    expect(name + ", wild stream", op.run(workspace, size, executor, wild), INVALID, name, "stream is 0x1234");
    if (size > 0) {
        expect(name + ", workspace null", op.run(nullptr, size, executor, nullptr), NULLPTR_ERROR, name,
               "workspace is null");
        expect(name + ", workspace too small", op.run(workspace, size - 1, executor, nullptr), INVALID, name,
               "workspace has ");
        void *wildSpace = reinterpret_cast<void *>(0x10000);
        expect(name + ", wild workspace", op.run(wildSpace, size, executor, nullptr), INVALID, name,
               "workspace is 0x10000");
    }
    expect(name + ", run", op.run(workspace, size, executor, nullptr), 0, name, "");
    aclrtSynchronizeStream(nullptr);
    expect(name + ", spent executor", op.run(workspace, size, executor, nullptr), INVALID, name, "no longer alive");
    expect(name + ", wild executor", op.run(workspace, size, reinterpret_cast<aclOpExecutor *>(0x40), nullptr), INVALID,
           name, "which is not a handle");
    expect(name + ", tensor for an executor",
           op.run(workspace, size, reinterpret_cast<aclOpExecutor *>(arguments["input"]), nullptr), INVALID, name,
           "a handle of another type (Tensor)");

    expect(name + ", plan", op.plan(arguments, &size, &executor), 0, name, "");
    aclrtFree(arguments.data("input"));
    arguments.forget("input");
    expect(name + ", freed since", op.run(workspace, size, executor, nullptr), INVALID, name,
           "input has its storage at ");
    aclDestroyAclOpExecutor(executor);
    aclrtFree(workspace);

    Call bare = op.sound();
    bare["mean"].bare = true;
    Arguments unaddressed(bare);
    expect(name + ", plan without memory", op.plan(unaddressed, &size, &executor), 0, name, "");
    aclrtMalloc(&workspace, size + 64, ACL_MEM_MALLOC_HUGE_FIRST);
    expect(name + ", run without memory", op.run(workspace, size, executor, nullptr), INVALID, name,
           "mean has no memory");
    aclDestroyAclOpExecutor(executor);
    aclrtFree(workspace);
}

// What a product that NORMGRAD_PRODUCT names answers.
void productRows(const Operator &op, const std::string &soc)
{
    const bool lacks = soc == "Ascend310B1" || (soc == "Ascend310P3" && std::string(op.name) != "aclnnLayerNormBackward");
    const std::string name = std::string(op.name) + " on " + soc;
    Arguments arguments(op.sound());
    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
    const int status = op.plan(arguments, &size, &executor);
    expect(name, status, lacks ? ACLNN_ERR_INNER_FIND_KERNEL_ERROR : 0, op.name, "has no ");
    if (lacks)
        return;
    aclDestroyAclOpExecutor(executor);
    Call narrow = op.sound();
    for (auto &item : narrow.tensors)
        if (item.first != "counter")
            item.second.type = ACL_BF16;
    Arguments narrowArguments(narrow);
    const bool takes = soc == "Ascend910B3" || soc == "Ascend950PR";
    expect(name + ", bfloat16", op.plan(narrowArguments, &size, &executor), takes ? 0 : INVALID, op.name,
           "gradOut is bfloat16, and must be float32 or float16 (on ");
}

} // namespace

int main(int count, char **arguments)
{
    aclInit(nullptr);
    aclrtSetDevice(0);
    const std::vector<Operator> operators = {layerNormBackward(), groupNormBackward(), batchNormElemtBackward()};
    if (count > 1) {
        const char *name = aclrtGetSocName();
        if (!name || std::strcmp(name, arguments[1]) != 0)
            failures++, std::printf("FAILED aclrtGetSocName: %s\n", name ? name : "null");
        for (const Operator &op : operators)
            productRows(op, arguments[1]);
    } else {
        const Rows rows[] = {layerNormRows(), groupNormRows(), batchNormRows()};
        for (size_t i = 0; i < operators.size(); i++) {
            planRows(operators[i], rows[i]);
            runRows(operators[i]);
        }
    }
    std::printf("%d checked, %d failed\n", checked, failures);
    aclrtResetDevice(0);
    aclFinalize();
    return failures ? 1 : 0;
}
