// What the loops of this folder share: the constants of 8-bit codes, and threads that take chunks of memory in turn.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

constexpr float kKnee = 0.0625f, kTiny = 0x1p-126f;  // see adamw8bit.py
constexpr double kSigned = 127 * 1.0625, kUnsigned = 256 * 1.0625;
constexpr float kFromSigned = float(1 / kSigned), kFromUnsigned = float(1 / kUnsigned);

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Call `work(piece, chunk)` for each of `num_chunks(piece)` chunks of each piece, on at most `num_threads` threads, which
// end before it returns: nothing of them is left that a fork could lose. A thread that starts late, or not at all, delays
// nobody.
template <class NumChunks, class Work>
void in_turns(int64_t num_pieces, int64_t num_threads, NumChunks num_chunks, Work work) {
  std::atomic<int64_t> next{0};
  const auto turns = [&] {
    int64_t piece = 0, before = 0;  // chunks of all pieces before this one
    for (;;) {
      const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      for (; piece < num_pieces && chunk >= before + num_chunks(piece); ++piece) before += num_chunks(piece);
      if (piece == num_pieces) return;
      work(piece, chunk - before);
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int64_t i = 1; i < num_threads; ++i) threads.emplace_back(turns);
  } catch (const std::system_error&) {  // no more threads: those that there are do all
  }
  turns();
  for (auto& thread : threads) thread.join();
}
