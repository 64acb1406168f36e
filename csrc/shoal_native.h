// The C ABI of libshoal_native. Functions take pointers and sizes, return no memory and know neither torch nor Python.
#pragma once

#include <cstdint>

#define SHOAL_API extern "C" __attribute__((visibility("default")))

// Raised by one whenever a signature below changes; shoal.lowlevel.native refuses a library of another version.
#define SHOAL_ABI_VERSION 16

SHOAL_API std::int32_t shoal_abi_version();

// Instruction sets this processor and its operating system run, one bit each. shoal.lowlevel.native holds the same list.
enum ShoalFeature : std::uint64_t {
    SHOAL_AVX2 = 1u << 0,
    SHOAL_FMA = 1u << 1,
    SHOAL_F16C = 1u << 2,
    SHOAL_AVX512F = 1u << 3,
    SHOAL_AVX512BW = 1u << 4,
    SHOAL_AVX512VL = 1u << 5,
    SHOAL_AVX512VBMI = 1u << 6,
    SHOAL_AVX512BF16 = 1u << 7,
    SHOAL_NEON = 1u << 8,
};

SHOAL_API std::uint64_t shoal_cpu_features();

enum ShoalLayoutOutcome : std::int32_t {
    SHOAL_LAYOUT_FOUND = 0,
    SHOAL_LAYOUT_IMPOSSIBLE = 1,
    SHOAL_LAYOUT_GAVE_UP = 2,  // out of nodes or seconds, or told to stop
};

// The rules of the search that it is exact without, only slower: csrc/layout.cpp says what each is.
enum ShoalLayoutRule : std::uint32_t {
    SHOAL_LAYOUT_LOWEST = 1u << 0,
    SHOAL_LAYOUT_PAIR = 1u << 1,
    SHOAL_LAYOUT_GAP = 1u << 2,
    SHOAL_LAYOUT_PARTS = 1u << 3,
    SHOAL_LAYOUT_FAILURES = 1u << 4,
};

// Addresses for `count` blocks, each of `size` > 0 bytes in use from `lower` to `upper` (excluded), below `capacity`. Among
// blocks that can lie equally low the first is tried first, so their order matters. `failures` has `count` elements: how
// often the search failed in each section of time is added to them. They say where to begin: zeros at first, then what
// the attempt before left. `stop` may be set from another thread. `offsets` is written only where a layout was found.
SHOAL_API std::int32_t shoal_layout_search(std::int64_t count, const std::int64_t* lower, const std::int64_t* upper,
                                           const std::int64_t* size, std::int64_t capacity, std::uint32_t rules,
                                           std::int64_t most_nodes, double seconds, const volatile std::int32_t* stop,
                                           std::int64_t* failures, std::int64_t* offsets);

// Instruction sets the normalising kernels are built for; a negative level is the best this processor runs.
enum ShoalLevel : std::int32_t { SHOAL_PORTABLE = 0, SHOAL_AVX2_LEVEL = 1, SHOAL_AVX512_LEVEL = 2 };

SHOAL_API std::int32_t shoal_norm_conv_level();

enum ShoalOutcome : std::int32_t { SHOAL_DONE = 0, SHOAL_NO_SUCH_LEVEL = 1 };

// y = convolution(act((x - mean) * scale + shift)) of stride 1 that keeps height and width, float32. Pixels of x, y and their
// gradients lie in NHWC order, `ld_` floats apart. An element of the weight is at out * weight_out + in * weight_in +
// tap * weight_tap, the taps counted along rows. `workspace` holds as many bytes as shoal_norm_conv_workspace_bytes says
// for the same sizes, threads and level, and begins at a multiple of 64. Nothing written may overlap anything read.
struct ShoalNormConv {
    std::int64_t images, height, width, in_channels, out_channels;
    std::int32_t kernel, relu;  // kernel: 1 or 3
    std::int32_t threads, level;
    const float* x;
    std::int64_t ld_x;
    const float *mean, *scale, *shift;
    const float* weight;
    std::int64_t weight_out, weight_in, weight_tap;
    const float* bias;  // may be null
    float* y;           // backward reads it where grad_mean_y is given
    std::int64_t ld_y;
    float *mean_y, *variance_y;  // null in forward: no statistics
    // Backward only from here. The whole gradient of y is grad_y * grad_factor + grad_mean_y / pixels
    // + 2 * grad_variance_y / pixels * (y - mean_y); without the factor where it is null, the product alone where the
    // gradients of the statistics are.
    const float* grad_y;
    std::int64_t ld_grad_y;
    const float* grad_factor;
    const float *grad_mean_y, *grad_variance_y;
    float* grad_x;
    std::int64_t ld_grad_x;
    std::int32_t accumulate, winograd;  // accumulate: added to grad_x; winograd, both ways: a 3 x 3 by 2 x 2 results
    float* grad_weight;               // (out, tap, in), dense
    float *grad_scale, *grad_shift;   // sum(da * (x - mean)) and sum(da)
    void* workspace;
};

SHOAL_API std::int64_t shoal_norm_conv_workspace_bytes(const ShoalNormConv* call, std::int32_t backward);
SHOAL_API std::int32_t shoal_norm_conv_forward(const ShoalNormConv* call);
SHOAL_API std::int32_t shoal_norm_conv_backward(const ShoalNormConv* call);

// The gradient of the weight of a convolution of relu((x - mean) * scale + shift), alone: kernel 1 or 3 with a padding of
// kernel / 2, any stride. out_height and out_width are those of y; grad_y is its whole gradient; the result lies densely
// as [out][tap][in]. Pixels in NHWC order, `ld` floats apart. The workspace may hold anything.
struct ShoalNormWeightGrad {
    std::int64_t images, height, width, out_height, out_width, in_channels, out_channels;
    std::int32_t kernel, stride, relu, threads, level, unused;
    const float* x;
    std::int64_t ld_x;
    const float *mean, *scale, *shift;
    const float* grad_y;
    std::int64_t ld_grad_y;
    float* grad_weight;
    void* workspace;
};

SHOAL_API std::int64_t shoal_norm_weight_grad_workspace_bytes(const ShoalNormWeightGrad* call);
SHOAL_API std::int32_t shoal_norm_weight_grad(const ShoalNormWeightGrad* call);

// A convolution in three dimensions, float32 or bfloat16 where a flag says so, sums in float32. What the first filter element
// of result (d, h, w) reads is at (d, h, w) * stride + origin of x, the others `dilation` apart; outside of x it is zero.
// Sizes, kernel, stride and dilation are at least 1. Strides `ld_` are in elements and may be anything: of x and y (image,
// channel, d, h, w), of the weight and its gradient (out, in, d, h, w). Results add to y where `accumulate` is set; the
// bias, of the weight's type, may be null. The gradient of the weight reads x and grad_y, which lies as y does. Nothing
// written may overlap anything read. Each sum is one thread's, in one order.
struct ShoalDirectConv {
    std::int64_t images, in_channels, out_channels;
    std::int64_t in_size[3], out_size[3], kernel[3], stride[3], dilation[3], origin[3];
    std::int64_t ld_x[5], ld_y[5], ld_weight[5];
    std::int32_t x_bfloat16, y_bfloat16, weight_bfloat16, accumulate;
    std::int32_t threads, level;
    const void *x, *weight, *bias;
    void* y;
    const void* grad_y;
    void *grad_weight, *workspace;
};

SHOAL_API std::int64_t shoal_direct_conv_workspace_bytes(const ShoalDirectConv* call, std::int32_t of_weight);
SHOAL_API std::int32_t shoal_direct_conv(const ShoalDirectConv* call);
SHOAL_API std::int32_t shoal_direct_conv_weight_grad(const ShoalDirectConv* call);

// What comes after a norm: leaky ReLU's slope or ELU's alpha, greater than 0, is one more number. All but ReLU have an inverse.
enum ShoalActivation : std::int32_t { SHOAL_IDENTITY = 0, SHOAL_RELU = 1, SHOAL_LEAKY_RELU = 2, SHOAL_ELU = 3 };

// The passes of a norm over tensors of `images` of `channels` of `pixels`, float32: pixels in NHWC order, `ld_` floats from
// pixel to pixel, where channels_last is set; else in NCHW order, `ld_` floats from image to image.
//
// statistics: mean and biased variance of the channels of x. apply: out = act((x - mean) * scale + shift + residual).
// With da the gradient before the activation, made from `grad`, reduce: sum_of_centred = sum(da * (x - mean)), sum = sum(da),
// grad_x = da * scale and grad_residual = da; apply_backward: grad_x = (da + (x - mean) * slope + constant) * scale, without
// the last two where `slope` is null. Where `inverted` is set x is the result of apply, without a residual; x - mean is then
// everywhere (x - mean) * scale, made again from it, and the mean is not read.
//
// May be null: residual, grad_x and grad_residual, and `out` in backward: there it is the result of a ReLU, of which
// nothing but the signs counts, and without it made again from x. Tensors that are written may be any that are read, grad_x
// and grad_residual of reduce but not both; nothing else that is written may overlap anything.
struct ShoalNormPass {
    std::int64_t images, channels, pixels;
    std::int32_t channels_last, activation, inverted, threads, level;
    float alpha;
    const float* x;
    std::int64_t ld_x;
    const float* residual;
    std::int64_t ld_residual;
    float* out;
    std::int64_t ld_out;
    const float* grad;
    std::int64_t ld_grad;
    float* grad_x;
    std::int64_t ld_grad_x;
    float* grad_residual;
    std::int64_t ld_grad_residual;
    const float *mean, *scale, *shift, *slope, *constant;
    double *sum_of_centred, *sum;                // of reduce
    float *statistic_mean, *statistic_variance;  // of statistics
    void* workspace;                             // of both
};

SHOAL_API std::int64_t shoal_norm_pass_workspace_bytes(const ShoalNormPass* call);
SHOAL_API std::int32_t shoal_norm_statistics(const ShoalNormPass* call);
SHOAL_API std::int32_t shoal_norm_apply(const ShoalNormPass* call);
SHOAL_API std::int32_t shoal_norm_reduce(const ShoalNormPass* call);
SHOAL_API std::int32_t shoal_norm_apply_backward(const ShoalNormPass* call);

// Codes of a table of 128 magnitudes, blocks of `block_elements` sharing a scale, the last one perhaps short; float32 and
// codes lie densely. What is derived from a table (`shoal_codec_table`: 128 magnitudes that ascend from 0 to at most 1,
// 127 thresholds between them) takes as many bytes as shoal_codec_table_bytes says, at a multiple of 8. Encode reads x and
// writes scales and codes; decode reads codes and scales and writes out.
struct ShoalTableCodec {
    std::int64_t elements, block_elements;
    std::int32_t threads, level;
    const void* table;
    const float* x;
    float* scales;
    std::uint8_t* codes;
    float* out;
    std::int32_t has_scale;  // else each block's greatest magnitude
    float scale;
    std::int32_t draws;  // rounds at random, by `seed` and the number of each element, the first of which is:
    std::uint32_t seed;
    std::int64_t first_element;
};

SHOAL_API std::int64_t shoal_codec_table_bytes();
SHOAL_API void shoal_codec_table(const float* magnitudes, const float* thresholds, void* table);
SHOAL_API std::int32_t shoal_table_encode(const ShoalTableCodec* call);
SHOAL_API std::int32_t shoal_table_decode(const ShoalTableCodec* call);

// What an all-reduce does with a rank's share, in one pass: adds to the values what each message stands for, message by
// message, divides them by `divisor`, encodes that, and writes what the codes stand for in the values' place. `codec` has
// x and out at the values, and the scales and codes to be written; the messages' scales and codes are of the same blocks.
struct ShoalTableMean {
    ShoalTableCodec codec;
    std::int64_t messages;
    const float* const* scales;
    const std::uint8_t* const* codes;
    float divisor;
};

SHOAL_API std::int32_t shoal_table_mean(const ShoalTableMean* call);

// Sets the top bit of each code where the value, of a ReLU clipped at `above` (NaN: not clipped), is 0 or clipped, and
// clears it elsewhere.
SHOAL_API void shoal_note_closed(const float* x, std::int64_t elements, float above, std::int32_t threads,
                                 std::int32_t level, std::uint8_t* codes);

// The gradient where its byte of `gates` is greater than `above`, 0 elsewhere. `result` may be `grad`.
SHOAL_API void shoal_gate(const float* grad, const std::uint8_t* gates, std::int32_t above, std::int64_t elements,
                          std::int32_t threads, std::int32_t level, float* result);

// Max pooling, float32 or bfloat16: the first of each window's greatest values, or its last NaN, and in a byte where it is: the
// sum of its number along each axis times that axis' place_step. A window of at most 255 places has one in the input at
// least. After a ReLU, the byte is 255 where the maximum is 0. A tensor is `planes` of pixels of `pixel` values: those
// in NHWC order have an image a plane and its channels in a pixel, those in NCHW order a channel a plane. Backward writes
// the gradient of x from that of the result and the bytes, of windows in the order that they lie in, rounded after each.
struct ShoalMaxPool {
    std::int64_t planes, pixel;
    std::int64_t in_size[3], out_size[3], kernel[3], stride[3], padding[3], place_step[3];
    std::int32_t bfloat16, after_relu, threads, level;
    const void* x;
    void* pooled;
    std::uint8_t* places;  // read by backward
    const void* grad;
    void* grad_x;
};

SHOAL_API std::int32_t shoal_max_pool(const ShoalMaxPool* call);
SHOAL_API std::int32_t shoal_max_pool_backward(const ShoalMaxPool* call);

// Batch norm's gradient of its input in training mode, pixels in NHWC order, of float32 or bfloat16, given those of weight
// and bias: (grad - mean_grad - (x - mean) * projection) * invstd * weight in float32, in this order, where mean_grad is
// of_bias / rows and projection is of_weight * invstd / rows; `fused` does not round the product that is taken off.
// `result` may be `grad`.
struct ShoalNormGradient {
    std::int64_t rows, channels;
    std::int32_t bfloat16, fused;
    std::int32_t threads, level;
    const void *grad, *x;                                      // (rows, channels)
    const float *mean, *invstd, *weight, *of_weight, *of_bias;  // (channels)
    float* scratch;                                             // (2, channels)
    void* result;
};

SHOAL_API void shoal_norm_gradient(const ShoalNormGradient* call);

// The top `width` bytes, 1 to 3, of float32, the lowest first: `nearest` rounds, else they are cut. Pack reads values and
// writes packed, unpack the other way round.
struct ShoalTruncation {
    std::int64_t elements;
    std::int32_t width, nearest;
    std::int32_t threads, level;
    float* values;
    std::uint8_t* packed;
};

SHOAL_API std::int32_t shoal_truncation_pack(const ShoalTruncation* call);
SHOAL_API std::int32_t shoal_truncation_unpack(const ShoalTruncation* call);

// One bit a value, eight a byte, the first in the lowest bit, the last byte filled up with zeros. one_bit: whether it is
// negative, and the means (of the values that are not, of those that are) of each block of `block_elements`, a multiple
// of 8; sign_mask: whether it is positive, and back as bytes of 0 and 1.
struct ShoalBits {
    std::int64_t elements, block_elements;
    std::int32_t threads, level;
    float* values;       // read by encode, written by one_bit's decode
    float* means;        // two a block, of one_bit
    std::uint8_t* bits;
    std::uint8_t* flags;  // written by sign_mask's decode
};

SHOAL_API std::int32_t shoal_one_bit_encode(const ShoalBits* call);
SHOAL_API std::int32_t shoal_one_bit_decode(const ShoalBits* call);
SHOAL_API std::int32_t shoal_sign_mask_encode(const ShoalBits* call);
SHOAL_API std::int32_t shoal_sign_mask_decode(const ShoalBits* call);

// A training step as shoal.core.step has it, for csrc/transfer_places.cpp. Ops run in the order of their numbers, the
// `forward` first ones being the forward pass. What runs once more has its second run's reads, writes, times and so on at
// its number + `ops`; the storages that op i reads are reads[reads_begin[i]:reads_begin[i + 1]].
struct ShoalTransferStep {
    std::int64_t ops, forward, storages;
    std::int64_t resident_bytes;
    const std::int64_t *reads_begin, *reads, *writes_begin, *writes;
    const std::int64_t *workspace_bytes, *overwrites;
    const double *seconds, *launch_seconds;
    const std::uint8_t* is_backward;  // by first run
    // By storage; producer is -1 for what no op writes.
    const std::int64_t *nbytes, *host_bytes, *producer, *last_forward_reader;
    const std::uint8_t *stays, *may_be_given_up, *may_leave;
    const double *to_host_seconds, *to_device_seconds;
    std::int64_t written_count;
    const std::int64_t* written;  // what may leave, in the order in which it is written
    std::int32_t overlaps;
};

// The passes of a schedule in units, as shoal.planners.transfer_places.TransferPlaces has them; of the backward pass the last
// first. `back` are the storages that can leave, in the order of their copies back read backwards in time.
struct ShoalTransferPlaces {
    const ShoalTransferStep* step;
    const std::uint8_t* kept;  // by storage
    std::int64_t budget_bytes;
    double *forward_seconds, *backward_seconds, *between_seconds;
    std::int64_t *forward_room_bytes, *backward_room_bytes, *between_room_bytes;
    std::int64_t *backward_op, *back, *back_unit;
    double* early_seconds;    // by storage
    std::uint8_t* can_leave;  // by storage
    std::int64_t backward, between, returning;  // how many
};

// By storage: the forward op after which it is freed, the backward op before which it is fetched; -1 where it stays.
struct ShoalTransferPlaced {
    const ShoalTransferPlaces* places;
    const std::uint8_t* wanted;  // by storage
    std::int64_t *released, *fetched;
    double seconds;
    std::int64_t excess_bytes, host_bytes;
};

// 0, or 1 where memory ran out.
SHOAL_API std::int32_t shoal_transfer_places(ShoalTransferPlaces* places);
SHOAL_API std::int32_t shoal_transfer_place(ShoalTransferPlaced* placed);
