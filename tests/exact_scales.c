/* kernels/rounding.py divides by 448 and 127 without a division: is that RN(x / M) for every float32 x >= 0?

   Run by test_exact_scales.py. Prints a line for each M and returns 1 if one x differs. Where the quotient is no normal
   number the kernels replace it, so there it only has to stay below the smallest normal one. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static float float_of(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }

static float divide_by(float x, float divisor) {
    float inverse = 1.0f / divisor, quotient = x * inverse;
    float remainder = fmaf(-divisor, quotient, x);
    return isinf(x) ? x : fmaf(remainder, inverse, quotient);
}

int main(void) {
    const float divisors[] = {448.0f, 127.0f}, tiny = 0x1p-126f;
    int failed = 0;
    for (int i = 0; i < 2; i++) {
        uint64_t tried = 0, differ = 0;
        for (uint32_t bits = 0; bits <= 0x7f800000u; bits++, tried++) { /* 0 to infinity */
            float x = float_of(bits), got = divide_by(x, divisors[i]), wanted = x / divisors[i];
            differ += wanted < tiny ? !(got < tiny) : bits_of(got) != bits_of(wanted);
        }
        if (!isnan(divide_by(NAN, divisors[i]))) differ++;
        printf("%g: %llu tried, %llu differ\n", divisors[i], (unsigned long long)tried, (unsigned long long)differ);
        failed |= differ != 0;
    }
    return failed;
}
