#include "dist/pipeline/draw.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace tapeline {
namespace {

template <class F>
void for_each_action(const Schedule& s, const Simulation& sim, const F& f) {
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    for (size_t i = 0; i < s.ranks[r].size(); ++i) {
      f(r, s.ranks[r][i], sim.actions[r][i]);
    }
  }
}

// 'O' for an overlapped pair.
char letter_of(const Action& action) {
  return action.overlapped() ? 'O' : letter(action.passes()[0].kind);
}

// Of all actions that take time.
double shortest(const Schedule& s, const Simulation& sim) {
  double out = sim.makespan;
  for_each_action(s, sim, [&](size_t, const Action&, const Span& span) {
    if (span.end > span.begin) out = std::min(out, span.end - span.begin);
  });
  return out;
}

// Columns per unit of time with which every name and a blank fit.
double named_scale(const Schedule& s, const Simulation& sim) {
  double scale = 0;
  for_each_action(s, sim, [&](size_t, const Action& a, const Span& span) {
    const auto wanted = static_cast<double>(to_string(a).size() + 1);
    scale = std::max(scale, wanted / (span.end - span.begin));
  });
  return scale;
}

std::string hue(const Action& action) {
  switch (letter_of(action)) {
    case 'F':
      return "210";
    case 'I':
      return "145";
    case 'W':
      return "45";
    case 'B':
      return "120";
    default:
      return "285";
  }
}

// Short and the same on every machine.
std::string number(double value) {
  return absl::StrCat(std::round(value * 100) / 100);
}

}  // namespace

std::string ascii_timeline(const Schedule& s, const Simulation& sim,
                           int columns) {
  const auto fits = [&](double scale) {
    return std::ceil(sim.makespan * scale) <= columns;
  };
  double scale = named_scale(s, sim);
  const bool named = fits(scale);
  if (!named) scale = 1 / shortest(s, sim);
  if (!fits(scale)) scale = sim.makespan > 0 ? columns / sim.makespan : 0;
  const auto column = [&](double time) {
    return static_cast<size_t>(std::llround(time * scale));
  };
  std::vector<std::string> rows(s.ranks.size(),
                                std::string(column(sim.makespan), '.'));
  for_each_action(s, sim, [&](size_t r, const Action& a, const Span& span) {
    const size_t begin = column(span.begin);
    const size_t width = column(span.end) - begin;
    std::string shown(width, named ? ' ' : letter_of(a));
    if (named) {
      const std::string name = to_string(a);
      shown.replace(0, std::min(name.size(), width), name, 0, width);
    }
    rows[r].replace(begin, width, shown);
  });
  std::string out;
  const size_t digits = absl::StrCat(rows.size() - 1).size();
  for (size_t r = 0; r < rows.size(); ++r) {
    const std::string rank = absl::StrCat(r);
    absl::StrAppend(&out, "rank ", std::string(digits - rank.size(), ' '), rank,
                    " |", rows[r], "\n");
  }
  return out;
}

std::string svg_timeline(const Schedule& s, const Simulation& sim) {
  constexpr double kRow = 28, kLeft = 64, kTop = 8;
  // The shortest action is wide enough for its name, within reason.
  const double scale =
      sim.makespan > 0 ? std::min(40 / shortest(s, sim), 16000 / sim.makespan)
                       : 1;
  const double bottom = kTop + kRow * static_cast<double>(s.ranks.size());
  const double right = kLeft + sim.makespan * scale;
  std::string out =
      absl::StrCat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"",
                   number(right + 16), "\" height=\"", number(bottom + 28),
                   "\" font-family=\"sans-serif\" font-size=\"10\">\n");
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    absl::StrAppend(&out, "<text x=\"4\" y=\"",
                    number(kTop + kRow * static_cast<double>(r) + 18),
                    "\">rank ", r, "</text>\n");
  }
  for_each_action(s, sim, [&](size_t r, const Action& a, const Span& span) {
    const std::string name = to_string(a);
    const double x = kLeft + span.begin * scale;
    const double width = (span.end - span.begin) * scale;
    const double y = kTop + kRow * static_cast<double>(r);
    const int shade = 84 - 28 * a.passes()[0].stage / std::max(1, s.stages());
    absl::StrAppend(&out, "<rect x=\"", number(x), "\" y=\"", number(y + 2),
                    "\" width=\"", number(width), "\" height=\"",
                    number(kRow - 4), "\" fill=\"hsl(", hue(a), ",60%,", shade,
                    "%)\" stroke=\"#444\" stroke-width=\"0.5\"><title>", name);
    absl::StrAppend(&out, " ", number(span.begin), " to ", number(span.end),
                    "</title></rect>\n");
    if (6.0 * static_cast<double>(name.size()) <= width) {
      absl::StrAppend(&out, "<text x=\"", number(x + 3), "\" y=\"",
                      number(y + 18), "\">", name, "</text>\n");
    }
  });
  // Ticks at 1, 2 or 5 times a power of ten, eight to twenty of them.
  double step =
      std::pow(10, std::floor(std::log10(std::max(sim.makespan, 1e-9) / 8)));
  for (const double factor : {2.0, 2.5, 2.0}) {
    if (sim.makespan / step > 20) step *= factor;
  }
  for (double t = 0; t <= sim.makespan; t += step) {
    absl::StrAppend(&out, "<text x=\"", number(kLeft + t * scale), "\" y=\"",
                    number(bottom + 16), "\" fill=\"#666\">", number(t),
                    "</text>\n");
  }
  return out + "</svg>\n";
}

}  // namespace tapeline
