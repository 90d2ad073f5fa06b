// A whole training step of synchronised BatchNorm, forward and backward, with two ranks played by one program.
//
// Each rank has its own samples. The statistics and the backward sums are what ranks exchange; here they meet in
// host memory. The result is checked against BatchNorm over the whole batch, computed in double precision.
#include <cmath>

#include "aclnnop/aclnn_batch_norm_backward_reduce.h"
#include "aclnnop/aclnn_batch_norm_elemt.h"
#include "aclnnop/aclnn_batch_norm_elemt_backward.h"
#include "aclnnop/aclnn_batch_norm_gather_stats_with_counts.h"
#include "aclnnop/aclnn_batch_norm_stats.h"

#include "common.h"

namespace {

constexpr int RANKS = 2, CHANNELS = 3, PLACES = 4;
constexpr int SAMPLES[RANKS] = {2, 3};
constexpr double EPS = 1e-5, MOMENTUM = 0.1;

// One rank's data and, step by step, its results.
struct Rank {
    explicit Rank(int samples, unsigned seed)
        : count(samples * PLACES), shape({samples, CHANNELS, PLACES}), inputValues(noise(seed)),
          gradValues(noise(seed + 1)), input(shape, inputValues), gradOut(shape, gradValues), output(shape),
          gradInput(shape), mean({CHANNELS}), invstd({CHANNELS}), sumDy({CHANNELS}), sumDyXmu({CHANNELS}),
          gradWeight({CHANNELS}), gradBias({CHANNELS})
    {
    }

    std::vector<float> noise(unsigned seed) const
    {
        std::vector<float> values;
        for (int64_t i = 0; i < numel(shape); i++) {
            seed = seed * 1664525u + 1013904223u;
            values.push_back(static_cast<float>(seed >> 8) / 16777216.0f * 4 - 1);
        }
        return values;
    }

    int count;
    std::vector<int64_t> shape;
    std::vector<float> inputValues, gradValues;
    DeviceTensor input, gradOut, output, gradInput, mean, invstd, sumDy, sumDyXmu, gradWeight, gradBias;
};

std::vector<float> together(const std::vector<float> &a, const std::vector<float> &b)
{
    std::vector<float> both(a);
    both.insert(both.end(), b.begin(), b.end());
    return both;
}

std::vector<float> added(const std::vector<float> &a, const std::vector<float> &b)
{
    std::vector<float> sum;
    for (size_t i = 0; i < a.size(); i++)
        sum.push_back(a[i] + b[i]);
    return sum;
}

// BatchNorm over the whole batch in double precision: the largest difference of outputs and gradients.
double error(const Rank *const (&ranks)[RANKS], const std::vector<float> &weight, const std::vector<float> &bias)
{
    double largest = 0;
    for (int c = 0; c < CHANNELS; c++) {
        double n = 0, sum = 0, squares = 0, dy = 0, dyXmu = 0;
        const auto each = [&](const std::function<void(size_t, size_t)> &body) {
            for (size_t r = 0; r < RANKS; r++)
                for (int s = 0; s < SAMPLES[r]; s++)
                    for (int p = 0; p < PLACES; p++)
                        body(r, static_cast<size_t>((s * CHANNELS + c) * PLACES + p));
        };
        each([&](size_t r, size_t i) { n += 1, sum += ranks[r]->inputValues[i]; });
        const double mean = sum / n;
        each([&](size_t r, size_t i) { squares += std::pow(ranks[r]->inputValues[i] - mean, 2); });
        const double invstd = 1 / std::sqrt(squares / n + EPS);
        each([&](size_t r, size_t i) {
            dy += ranks[r]->gradValues[i];
            dyXmu += ranks[r]->gradValues[i] * (ranks[r]->inputValues[i] - mean);
        });
        const size_t channel = static_cast<size_t>(c);
        std::vector<float> outputs[RANKS], gradients[RANKS];
        for (size_t r = 0; r < RANKS; r++)
            outputs[r] = ranks[r]->output.values(), gradients[r] = ranks[r]->gradInput.values();
        each([&](size_t r, size_t i) {
            const double centred = ranks[r]->inputValues[i] - mean;
            const double y = centred * invstd * weight[channel] + bias[channel];
            const double dx = (ranks[r]->gradValues[i] - dy / n - centred * invstd * invstd * dyXmu / n) * invstd *
                              weight[channel];
            largest = std::max(largest, std::fabs(y - outputs[r][i]));
            largest = std::max(largest, std::fabs(dx - gradients[r][i]));
        });
    }
    return largest;
}

} // namespace

int main()
{
    Session session;
    Rank first(SAMPLES[0], 1), second(SAMPLES[1], 100);
    Rank *const ranks[RANKS] = {&first, &second};
    const std::vector<float> weightValues = {1, 0.5f, 2}, biasValues = {0, 1, -1};
    DeviceTensor weight({CHANNELS}, weightValues), bias({CHANNELS}, biasValues);

    // Forward: each rank's statistics, those of the whole batch, each rank's output.
    for (Rank *rank : ranks)
        execute(
            [&](uint64_t *size, aclOpExecutor **executor) {
                return aclnnBatchNormStatsGetWorkspaceSize(
                    rank->input.get(), EPS, rank->mean.get(), rank->invstd.get(), size, executor);
            },
            aclnnBatchNormStats, session.stream());
    const int32_t countValues[RANKS] = {first.count, second.count};
    DeviceTensor counts({RANKS}, ACL_INT32, countValues);
    DeviceTensor means({RANKS, CHANNELS}, together(first.mean.values(), second.mean.values()));
    DeviceTensor invstds({RANKS, CHANNELS}, together(first.invstd.values(), second.invstd.values()));
    DeviceTensor runningMean({CHANNELS}, {0, 0, 0}), runningVar({CHANNELS}, {1, 1, 1});
    DeviceTensor mean({CHANNELS}), invstd({CHANNELS});
    execute(
        [&](uint64_t *size, aclOpExecutor **executor) {
            return aclnnBatchNormGatherStatsWithCountsGetWorkspaceSize(
                first.input.get(), means.get(), invstds.get(), runningMean.get(), runningVar.get(), MOMENTUM, EPS,
                counts.get(), mean.get(), invstd.get(), size, executor);
        },
        aclnnBatchNormGatherStatsWithCounts, session.stream());
    for (Rank *rank : ranks)
        execute(
            [&](uint64_t *size, aclOpExecutor **executor) {
                return aclnnBatchNormElemtGetWorkspaceSize(
                    rank->input.get(), weight.get(), bias.get(), mean.get(), invstd.get(), EPS, rank->output.get(),
                    size, executor);
            },
            aclnnBatchNormElemt, session.stream());

    // Backward: each rank's sums, added up over the ranks, each rank's gradient.
    for (Rank *rank : ranks)
        execute(
            [&](uint64_t *size, aclOpExecutor **executor) {
                return aclnnBatchNormReduceBackwardGetWorkspaceSize(
                    rank->gradOut.get(), rank->input.get(), mean.get(), invstd.get(), weight.get(), true, true, true,
                    rank->sumDy.get(), rank->sumDyXmu.get(), rank->gradWeight.get(), rank->gradBias.get(), size,
                    executor);
            },
            aclnnBatchNormReduceBackward, session.stream());
    DeviceTensor sumDy({CHANNELS}, added(first.sumDy.values(), second.sumDy.values()));
    DeviceTensor sumDyXmu({CHANNELS}, added(first.sumDyXmu.values(), second.sumDyXmu.values()));
    for (Rank *rank : ranks)
        execute(
            [&](uint64_t *size, aclOpExecutor **executor) {
                return aclnnBatchNormElemtBackwardGetWorkspaceSize(
                    rank->gradOut.get(), rank->input.get(), mean.get(), invstd.get(), weight.get(), sumDy.get(),
                    sumDyXmu.get(), counts.get(), rank->gradInput.get(), size, executor);
            },
            aclnnBatchNormElemtBackward, session.stream());

    print("mean", mean);
    print("invstd", invstd);
    print("runningMean", runningMean);
    print("runningVar", runningVar);
    const double largest = error({ranks[0], ranks[1]}, weightValues, biasValues);
    std::printf("outputs and gradients of both ranks: %s\n", largest < 1e-5 ? "right" : "wrong");
    return largest < 1e-5 ? 0 : 1;
}
