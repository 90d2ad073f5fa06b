// One call of an operator, described by its arguments' C names, so that a test can break one of them at a time.
#ifndef CALL_H
#define CALL_H

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_batch_norm_elemt_backward.h"
#include "aclnnop/aclnn_group_norm_backward.h"
#include "aclnnop/aclnn_layer_norm_backward.h"

using Shape = std::vector<int64_t>;

struct Spec {
    Shape shape;
    aclDataType type = ACL_FLOAT;
    aclFormat format = ACL_FORMAT_ND;
    Shape strides;      // empty: contiguous
    Shape storage;      // empty: the view's shape
    int64_t offset = 0;
    bool null = false;  // no tensor
    bool bare = false;  // a tensor without memory
    bool wild = false;  // memory that nobody allocated
    bool dead = false;  // a tensor that was destroyed
};

inline int64_t product(const Shape &shape)
{
    int64_t count = 1;
    for (int64_t size : shape)
        count *= size > 0 ? size : 0;
    return count;
}

struct Made {
    aclTensor *tensor = nullptr;
    void *data = nullptr;
};

struct Call {
    std::map<std::string, Spec> tensors;
    std::map<std::string, int64_t> numbers;
    Shape normalized;
    std::vector<char> mask = {1, 1, 1};
    bool nullNormalized = false, nullMask = false, nullSize = false, nullExecutor = false, wildSize = false;

    Spec &operator[](const char *name) { return tensors.at(name); }
};

// The tensors and arrays of a call, alive while it is planned and run.
class Arguments {
public:
    explicit Arguments(const Call &call) : call_(call)
    {
        for (const auto &item : call.tensors)
            made_[item.first] = make(item.second);
        if (!call.nullNormalized)
            normalized_ = aclCreateIntArray(call.normalized.data(), call.normalized.size());
        bool flags[8] = {};
        for (size_t i = 0; i < call.mask.size(); i++)
            flags[i] = call.mask[i] != 0;
        if (!call.nullMask)
            mask_ = aclCreateBoolArray(flags, call.mask.size());
    }
    ~Arguments()
    {
        for (const auto &item : made_) {
            if (!call_.tensors.at(item.first).dead)
                aclDestroyTensor(item.second.tensor);
            if (item.second.data)
                aclrtFree(item.second.data);
        }
        aclDestroyIntArray(normalized_);
        aclDestroyBoolArray(mask_);
    }
    Arguments(const Arguments &) = delete;
    Arguments &operator=(const Arguments &) = delete;

    aclTensor *operator[](const char *name) const { return made_.at(name).tensor; }
    void *data(const char *name) const { return made_.at(name).data; }
    void forget(const char *name) { made_.at(name).data = nullptr; }
    int64_t number(const char *name) const { return call_.numbers.at(name); }
    const aclIntArray *normalized() const { return normalized_; }
    const aclBoolArray *mask() const { return mask_; }
    uint64_t *size(uint64_t *place) const
    {
        return call_.wildSize ? reinterpret_cast<uint64_t *>(8) : call_.nullSize ? nullptr : place;
    }
    aclOpExecutor **executor(aclOpExecutor **place) const { return call_.nullExecutor ? nullptr : place; }

private:
    static Made make(const Spec &spec)
    {
        Made made;
        if (spec.null)
            return made;
        const Shape &storage = spec.storage.empty() ? spec.shape : spec.storage;
        const size_t bytes = static_cast<size_t>(product(storage)) * 16 + 16;
        void *address = nullptr;
        if (spec.wild) {
            address = reinterpret_cast<void *>(0x10000);
        } else if (!spec.bare) {
            aclrtMalloc(&made.data, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
            aclrtMemset(made.data, bytes, 0, bytes);
            address = made.data;
        }
        made.tensor = aclCreateTensor(spec.shape.data(), spec.shape.size(), spec.type,
                                      spec.strides.empty() ? nullptr : spec.strides.data(), spec.offset, spec.format,
                                      storage.data(), storage.size(), address);
        if (spec.dead)
            aclDestroyTensor(made.tensor);
        return made;
    }

    Call call_;
    std::map<std::string, Made> made_;
    aclIntArray *normalized_ = nullptr;
    aclBoolArray *mask_ = nullptr;
};

struct Operator {
    const char *name;
    std::function<Call()> sound;
    std::function<aclnnStatus(const Arguments &, uint64_t *, aclOpExecutor **)> plan;
    aclnnStatus (*run)(void *, uint64_t, aclOpExecutor *, aclrtStream);
};

inline Operator layerNormBackward()
{
    return {"aclnnLayerNormBackward",
            [] {
                Call call;
                for (const char *name : {"gradOut", "input", "gradInputOut"})
                    call.tensors[name].shape = {2, 3, 4};
                for (const char *name : {"mean", "rstd"})
                    call.tensors[name].shape = {2, 3, 1};
                for (const char *name : {"weightOptional", "biasOptional", "gradWeightOut", "gradBiasOut"})
                    call.tensors[name].shape = {4};
                call.normalized = {4};
                return call;
            },
            [](const Arguments &a, uint64_t *size, aclOpExecutor **executor) {
                return aclnnLayerNormBackwardGetWorkspaceSize(
                    a["gradOut"], a["input"], a.normalized(), a["mean"], a["rstd"], a["weightOptional"],
                    a["biasOptional"], a.mask(), a["gradInputOut"], a["gradWeightOut"], a["gradBiasOut"],
                    a.size(size), a.executor(executor));
            },
            aclnnLayerNormBackward};
}

inline Operator groupNormBackward()
{
    return {"aclnnGroupNormBackward",
            [] {
                Call call;
                for (const char *name : {"gradOut", "input", "gradInput"})
                    call.tensors[name].shape = {2, 6, 5};
                for (const char *name : {"mean", "rstd"})
                    call.tensors[name].shape = {2, 3};
                for (const char *name : {"gamma", "gradGammaOut", "gradBetaOut"})
                    call.tensors[name].shape = {6};
                call.numbers = {{"N", 2}, {"C", 6}, {"HxW", 5}, {"group", 3}};
                return call;
            },
            [](const Arguments &a, uint64_t *size, aclOpExecutor **executor) {
                return aclnnGroupNormBackwardGetWorkspaceSize(
                    a["gradOut"], a["input"], a["mean"], a["rstd"], a["gamma"], a.number("N"), a.number("C"),
                    a.number("HxW"), a.number("group"), a.mask(), a["gradInput"], a["gradGammaOut"],
                    a["gradBetaOut"], a.size(size), a.executor(executor));
            },
            aclnnGroupNormBackward};
}

inline Operator batchNormElemtBackward()
{
    return {"aclnnBatchNormElemtBackward",
            [] {
                Call call;
                for (const char *name : {"gradOut", "input", "gradInput"})
                    call.tensors[name].shape = {2, 3, 4};
                for (const char *name : {"mean", "invstd", "weight", "sumDy", "sumDyXmu"})
                    call.tensors[name].shape = {3};
                call.tensors["counter"].shape = {2};
                call.tensors["counter"].type = ACL_INT32;
                return call;
            },
            [](const Arguments &a, uint64_t *size, aclOpExecutor **executor) {
                return aclnnBatchNormElemtBackwardGetWorkspaceSize(
                    a["gradOut"], a["input"], a["mean"], a["invstd"], a["weight"], a["sumDy"], a["sumDyXmu"],
                    a["counter"], a["gradInput"], a.size(size), a.executor(executor));
            },
            aclnnBatchNormElemtBackward};
}

#endif
