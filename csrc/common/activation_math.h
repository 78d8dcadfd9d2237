// The activations and their derivatives, for a number or a vector V. Include it after the device-specific functions
// vec_abs(V, limit), vec_at_least(V, limit), vec_decay(V), which is exp(-x), vec_gauss(V), which is exp(-x^2 / 2), and
// vec_short_exp2(V).
#pragma once
#include <type_traits>

#include "common/activation.h"
#include "common/both.h"

namespace megatron {

// The element type of V.
template <typename V> struct RealOf { using type = float; };
template <typename V> using Real = typename RealOf<V>::type;

// f(x) and f'(x).
template <typename V> struct Curve { V value, slope; };

// All activations except relu(x)^2 are x G(x) with G(-x) = 1 - G(x), so the tail of G, G(-a), and the derivative of a
// G(-a), at a = |x|, are sufficient. The tail is computed directly, not as a difference from 1, which keeps it accurate
// until it underflows.
template <typename V> struct Tail { V tail, slope; };

// x G(x) and its derivative. From `end` on the tail is zero; a greater a is replaced by `end`, because infinity would
// give NaN.
template <typename F, typename V> MEGATRON_BOTH Curve<V> times_distribution(V x, int end, F distribution) {
  using R = Real<V>;
  const V a = vec_abs(x, R(end));
  const Tail<V> at = distribution(a);
  return {vec_at_least(x, R(0)) - a * at.tail, x < R(0) ? at.slope : R(1) - at.slope};
}

// exp(-a) for a >= 0. kShort, here and below: accuracy 2e-4 instead of 1e-7, sufficient for results in bfloat16.
template <bool kShort, typename V> MEGATRON_BOTH V decay(V a) {
  if constexpr (kShort) return vec_short_exp2(a * -1.44269504f);
  else return vec_decay(a);
}

// G(x) = 1 / (1 + exp(-w(x))), given a, w(a) and w'(a).
template <bool kShort, typename V> MEGATRON_BOTH Tail<V> logistic_tail(V a, V w, V slope) {
  const V small = decay<kShort>(w), tail = small / (Real<V>(1) + small);
  return {tail, tail - a * ((tail - tail * tail) * slope)};
}

constexpr double kNormalHeight = 0.39894228040143267794;  // maximum of the normal density, 1 / sqrt(2 pi)

// Phi(-a), given exp(-a^2 / 2). Their ratio, erfcx(a / sqrt(2)) / 2, decreases slowly and smoothly, and is approximated
// to 6e-9 by a quotient of polynomials with positive coefficients, which avoids cancellation. The coefficients were
// fitted by least squares, reweighted until the relative error was uniform over 0 <= a <= 15, where exp(-a^2 / 2)
// underflows.
template <typename V> MEGATRON_BOTH V vec_normal_tail(V a, V gauss) {
  const V above = (((0.0041531133f * a + 0.040880416f) * a + 0.18396713f) * a + 0.43928087f) * a + 0.5f;
  const V below =
      ((((0.010410202f * a + 0.10247812f) * a + 0.47140336f) * a + 1.2055402f) * a + 1.6764468f) * a + 1.0f;
  return gauss * (above / below);
}

// -log2(Phi(-a)) for a from 0 to 14, where Phi(-a) underflows in float, by a polynomial fitted in the same way; it
// gives Phi(-a) to 6e-5.
template <typename V> MEGATRON_BOTH V vec_tail_exponent(V a) {
  const V b = a * a;  // even and odd powers separately, so that they are independent
  const V odd = (((1.5976063e-9f * b + 4.0547056e-6f) * b + 9.8112947e-4f) * b + 0.053525165f) * b + 1.1507286f;
  const V even = (((-1.215887e-7f * b - 7.8348436e-5f) * b - 0.0084918644f) * b + 0.45932359f) * b + 1.0000489f;
  return even + a * odd;
}

// The derivative of a Phi(-a), with the same accuracy.
template <typename V> MEGATRON_BOTH V vec_tail_slope(V a, V tail) {
  return tail - a * (vec_short_exp2(a * a * -0.72134752f) * Real<V>(kNormalHeight));
}

// gelu(x) = x Phi(x) (Hendrycks and Gimpel 2016).
template <bool kShort> struct ErfGelu {
  template <typename V> MEGATRON_BOTH Curve<V> operator()(V x) const {
    if constexpr (kShort) {
      return times_distribution(x, 14, [](V a) {
        const V tail = vec_short_exp2(-vec_tail_exponent(a));
        return Tail<V>{tail, vec_tail_slope(a, tail)};
      });
    } else {
      return times_distribution(x, 40, [](V a) {
        const V gauss = vec_gauss(a), tail = vec_normal_tail(a, gauss);
        return Tail<V>{tail, tail - a * (gauss * Real<V>(kNormalHeight))};
      });
    }
  }
};

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) (ibid., section 2).
template <bool kShort> struct TanhGelu {
  template <typename V> MEGATRON_BOTH Curve<V> operator()(V x) const {
    using R = Real<V>;
    const R first = R(1.59576912160573071176), third = first * R(0.044715);  // 2 sqrt(2 / pi)
    return times_distribution(x, 40, [=](V a) {
      return logistic_tail<kShort>(a, a * (first + third * (a * a)), first + 3 * third * (a * a));
    });
  }
};

// silu(x) = x / (1 + exp(-x)) (ibid., section 2).
template <bool kShort> struct Silu {
  template <typename V> MEGATRON_BOTH Curve<V> operator()(V x) const {
    return times_distribution(x, 800, [](V a) { return logistic_tail<kShort>(a, a, V{} + Real<V>(1)); });
  }
};

// relu(x)^2 (So et al. 2021).
struct ReluSquare {
  template <typename V> MEGATRON_BOTH Curve<V> operator()(V x) const {
    const V positive = x < Real<V>(0) ? V{} : x;  // NaN stays NaN
    return {positive * positive, positive + positive};
  }
};

// Calls f(the activation, pieces): a row of x has 2 pieces for gated activations, else 1.
template <bool kShort, typename F> MEGATRON_BOTH void with_activation(int64_t activation, F f) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  switch (activation) {
    case Gelu: return f(ErfGelu<kShort>{}, One{});
    case GeluTanh: return f(TanhGelu<kShort>{}, One{});
    case SquaredRelu: return f(ReluSquare{}, One{});
    case SwiGlu: return f(Silu<kShort>{}, Two{});
    case GeGlu: return f(ErfGelu<kShort>{}, Two{});
    case GeGluTanh: return f(TanhGelu<kShort>{}, Two{});
  }
}

}  // namespace megatron
