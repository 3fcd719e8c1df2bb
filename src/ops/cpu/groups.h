// How the blocks of sixteen rows unpack, so that outputs lie in lanes: elements as unsigned bytes q, four of a row to a
// word, with the factors that make values of them:
//   value = d (q - kBias) + m
#pragma once

#include "ops/cpu/words.h"

namespace basin::ops::cpu::BASIN_TARGET {
namespace {

constexpr int kBlockWords = kBlock / 4;

// The words of a block in front of its elements, or of its scales, of each row.
struct Header {
  Words word[4];
};

BASIN_INLINE Header read_header(const std::byte* p, std::ptrdiff_t stride) {
  Header header;
  transpose(p, stride, [&](auto c, const Words& words) BASIN_LAMBDA { header.word[c] = words; });
  return header;
}

/// What a format says of sixteen rows. In it:
///   kElements, kBytes  of a block; kBias, kSign and kHasMin as above
///   kScales            d's of 32 elements: one, or one for each 16
///   kUnit              runs of 32 elements that unpack together
///   read               what the others need of the header
///   factors<i>         of the run i of a block: d[kScales] and, where kHasMin, m
///   kNibbles           where the elements of a block begin that are nibbles alone, as unpack_nibbles() has them; else absent
///   element            of a nibble, the byte q
///   unpack<u>          calls put(Index<run of the unit>(), Index<w>(), words) for the words w of the runs of unit u
template <Weights kWeights>
struct Group;

/// One d, a half, in front of a block of 32.
template <int kBlockBytes, int kTheBias>
struct ScaledBlocks {
  static constexpr std::int64_t kElements = 32, kBytes = kBlockBytes;
  static constexpr int kBias = kTheBias, kScales = 1, kUnit = 1;
  static constexpr Sign kSign = kTheBias == 128 ? Sign::wide : kTheBias == 0 ? Sign::none : Sign::biased;
  static constexpr bool kHasMin = kTheBias == 0;  // then a half behind d

  static BASIN_INLINE Header read(const std::byte* p, std::ptrdiff_t stride) {
    return read_header(p, stride);
  }
  template <int>
  static BASIN_INLINE void factors(const Header& header, F16 (&d)[kScales], [[maybe_unused]] F16& m) {
    d[0] = halves(header.word[0]);
    if constexpr (kHasMin) m = halves(shift_right<16>(header.word[0]));
  }
};

// Byte i of a block's sixteen holds the elements i (low bits) and i + 16 (high bits).
template <typename Put>
BASIN_INLINE void unpack_nibbles(const std::byte* p, std::ptrdiff_t stride, const Put& put) {
  transpose(p, stride, [&](auto c, const Words& both) BASIN_LAMBDA {
    put(Index<c>(), field<0, 15>(both));
    put(Index<4 + c>(), field<4, 15>(both));
  });
}

template <>
struct Group<Weights::q4_0> : ScaledBlocks<18, 8> {
  static constexpr int kNibbles = 2;
  static BASIN_INLINE Words element(const Words& nibbles) { return nibbles; }

  template <int, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header&, const Put& put) {
    unpack_nibbles(p + 2, stride, [&](auto w, const Words& q) BASIN_LAMBDA { put(Index<0>(), w, q); });
  }
};

template <>
struct Group<Weights::q4_1> : ScaledBlocks<20, 0> {
  static constexpr int kNibbles = 4;
  static BASIN_INLINE Words element(const Words& nibbles) { return nibbles; }

  template <int, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header&, const Put& put) {
    unpack_nibbles(p + 4, stride, [&](auto w, const Words& q) BASIN_LAMBDA { put(Index<0>(), w, q); });
  }
};

// The fifth bits of a block are a word, bit i for element i: those of the elements of word w, each in its byte.
template <int kWord>
BASIN_INLINE Words fifth_bits(const Words& bits) {
  const Words four = shift_right<4 * kWord>(bits) & set_words(15);
  // Copies at bits 0, 7, 14 and 21 put bit i of the four at bit 8 i.
  return shift_left<4>(four * set_words(0x00204081u) & set_words(0x01010101u));
}

template <>
struct Group<Weights::q5_0> : ScaledBlocks<22, 16> {
  template <int, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header& header,
                                  const Put& put) {
    const Words bits = shift_right<16>(header.word[0]) | shift_left<16>(header.word[1]);
    unpack_nibbles(p + 6, stride, [&](auto w, const Words& q) BASIN_LAMBDA {
      put(Index<0>(), w, q | fifth_bits<decltype(w)::value>(bits));
    });
  }
};

template <>
struct Group<Weights::q5_1> : ScaledBlocks<24, 0> {
  template <int, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header& header,
                                  const Put& put) {
    unpack_nibbles(p + 8, stride, [&](auto w, const Words& q) BASIN_LAMBDA {
      put(Index<0>(), w, q | fifth_bits<decltype(w)::value>(header.word[1]));
    });
  }
};

template <>
struct Group<Weights::q8_0> : ScaledBlocks<34, 128> {
  template <int, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header&, const Put& put) {
    unroll<2>([&](auto half) BASIN_LAMBDA {
      transpose(p + 2 + 16 * half, stride, [&](auto c, const Words& q) BASIN_LAMBDA {
        put(Index<0>(), Index<4 * half + c>(), signed_bytes(q));
      });
    });
  }
};

// Twice an e2m1 value, and 12: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
constexpr std::uint8_t kTwiceE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <>
struct Group<Weights::mxfp4> : ScaledBlocks<17, 12> {
  static constexpr int kNibbles = 1;
  static BASIN_INLINE Words element(const Words& nibbles) { return look_up(kTwiceE2m1, nibbles); }

  template <int>
  static BASIN_INLINE void factors(const Header& header, F16 (&d)[kScales], F16&) {
    // Half of 2^(e - 127), which may be subnormal: the product of two powers near its root.
    const Words e = header.word[0] & set_words(0xff);
    const auto power = [](const Words& n)
                           BASIN_LAMBDA { return as_floats(shift_left<23>(n + set_words(63))); };
    d[0] = mul(power(shift_right<1>(e)), power(shift_right<1>(e + set_words(1))));
  }
  template <int, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header&, const Put& put) {
    unpack_nibbles(p + 1, stride,
                   [&](auto w, const Words& q) BASIN_LAMBDA { put(Index<0>(), w, element(q)); });
  }
};

/// q4_k and q5_k: 256 elements, two halves, and eight pairs of 6-bit integers in 12 bytes; of a pair, one times the first
/// half is d, the other times the second is -m.
template <int kBlockBytes>
struct PairedBlocks {
  static constexpr std::int64_t kElements = 256, kBytes = kBlockBytes;
  static constexpr int kBias = 0, kScales = 1, kUnit = 2;
  static constexpr Sign kSign = Sign::none;
  static constexpr bool kHasMin = true;

  static BASIN_INLINE Header read(const std::byte* p, std::ptrdiff_t stride) {
    return read_header(p, stride);
  }

  template <int kRun>
  static BASIN_INLINE void factors(const Header& header, F16 (&d)[kScales], F16& m) {
    const Words byte = set_words(0x3f);
    const auto at = [&](const Words& a) BASIN_LAMBDA { return shift_right<8 * (kRun % 4)>(a); };
    Words scale = at(header.word[1]), minimum = at(header.word[2]);
    if constexpr (kRun >= 4) {
      const Words low = at(header.word[3]);
      scale = (low & set_words(0x0f)) | (shift_right<2>(scale) & set_words(0x30));
      minimum = (shift_right<4>(low) & set_words(0x0f)) | (shift_right<2>(minimum) & set_words(0x30));
    } else {
      scale = scale & byte;
      minimum = minimum & byte;
    }
    d[0] = mul(to_floats(scale), halves(header.word[0]));
    m = mul(to_floats(minimum), mul(halves(shift_right<16>(header.word[0])), set(-1.0f)));
  }
};

template <>
struct Group<Weights::q4_k> : PairedBlocks<144> {
  template <int kIndex, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header&, const Put& put) {
    unroll<2>([&](auto half) BASIN_LAMBDA {
      transpose(p + 16 + 32 * kIndex + 16 * half, stride, [&](auto c, const Words& both) BASIN_LAMBDA {
        put(Index<0>(), Index<4 * half + c>(), field<0, 15>(both));
        put(Index<1>(), Index<4 * half + c>(), field<4, 15>(both));
      });
    });
  }
};

template <>
struct Group<Weights::q5_k> : PairedBlocks<176> {
  // Bit 2 kIndex of byte i of the block's 32 belongs to element i of the unit's first run, the next to that of the second.
  template <int kIndex, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Header&, const Put& put) {
    unroll<2>([&](auto half) BASIN_LAMBDA {
      Words fifth[4];
      transpose(p + 16 + 16 * half, stride, [&](auto c, const Words& bits) BASIN_LAMBDA { fifth[c] = bits; });
      transpose(p + 48 + 32 * kIndex + 16 * half, stride, [&](auto c, const Words& both) BASIN_LAMBDA {
        const Words first = shift_left<4>(field<2 * kIndex, 1>(fifth[c]));
        const Words second = shift_left<4>(field<2 * kIndex + 1, 1>(fifth[c]));
        put(Index<0>(), Index<4 * half + c>(), field<0, 15>(both) | first);
        put(Index<1>(), Index<4 * half + c>(), field<4, 15>(both) | second);
      });
    });
  }
};

/// 256 elements: 128 bytes of low halves, 64 of pairs of high bits, sixteen signed scales, one for each 16 elements, and d.
template <>
struct Group<Weights::q6_k> {
  static constexpr std::int64_t kElements = 256, kBytes = 210;
  static constexpr int kBias = 32, kScales = 2, kUnit = 4;
  static constexpr Sign kSign = Sign::biased;
  static constexpr bool kHasMin = false;

  struct Scales {
    Header bytes;
    F16 d;
  };
  static BASIN_INLINE Scales read(const std::byte* p, std::ptrdiff_t stride) {
    // d is the last half of a block.
    return {read_header(p + 192, stride),
            halves(shift_right<16>(read_header(p + kBytes - 16, stride).word[3]))};
  }

  template <int kRun>
  static BASIN_INLINE void factors(const Scales& scales, F16 (&d)[kScales], F16&) {
    unroll<2>([&](auto part) BASIN_LAMBDA {
      constexpr int kIndex = 2 * kRun + part;
      // A signed byte: flipped, it is that and 128.
      const Words byte =
          (shift_right<8 * (kIndex % 4)>(scales.bytes.word[kIndex / 4]) & set_words(0xff)) ^ set_words(0x80);
      d[part] = mul(to_floats(byte + set_words(static_cast<std::uint32_t>(-128))), scales.d);
    });
  }

  template <int kIndex, typename Put>
  static BASIN_INLINE void unpack(const std::byte* p, std::ptrdiff_t stride, const Scales&, const Put& put) {
    unroll<2>([&](auto half) BASIN_LAMBDA {
      Words high[4];
      transpose(p + 128 + 32 * kIndex + 16 * half, stride,
                [&](auto c, const Words& bits) BASIN_LAMBDA { high[c] = bits; });
      unroll<2>([&](auto odd) BASIN_LAMBDA {
        transpose(p + 64 * kIndex + 32 * odd + 16 * half, stride,
                  [&](auto c, const Words& both) BASIN_LAMBDA {
                    const Words first = shift_left<4>(field<2 * odd, 3>(high[c]));
                    const Words second = shift_left<4>(field<4 + 2 * odd, 3>(high[c]));
                    put(Index<odd>(), Index<4 * half + c>(), field<0, 15>(both) | first);
                    put(Index<2 + odd>(), Index<4 * half + c>(), field<4, 15>(both) | second);
                  });
      });
    });
  }
};

}  // namespace
}  // namespace basin::ops::cpu::BASIN_TARGET
