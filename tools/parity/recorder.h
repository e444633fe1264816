// Recorder: an observer that keeps what a forward and backward pass shows,
// under the names that goldens use, and that may put a golden's discrete
// choices in place of the model's: all of them, or where scores tie. Which of
// several keys with one score is selected is nobody's rule (relu makes exact
// zeros), and everything behind it depends on it.
//
//   path layers.3.self_attn, name attn_lse   ->  attn_lse.3
//   path mtp.1.mlp, name router_logits       ->  mtp1.router_logits
//   path mtp.1, name mtp_in                  ->  mtp_in.1
//   path mtp_head.1, name logits             ->  mtp_logits.1
//   path lm_head, name logits                ->  logits
//   a gradient of hidden at layers.3         ->  grad_hidden.3
//   inside indexer_loss: index_target.3, index_kl_rows.3
#pragma once

#include <string>

#include "absl/status/status.h"
#include "autograd/observer.h"
#include "tools/parity/values.h"

namespace tapeline {

class Recorder : public Observer {
 public:
  // `choices` holds index_ids and router_ids to use; null: the model's own,
  // but where `ties` selects other keys with the same scores, those. Both
  // outlive the recorder.
  Recorder(const NamedValues* choices, const NamedValues& ties)
      : choices_(choices), ties_(ties) {}

  void value(const char* name, const std::string& path,
             const Tensor& x) override;
  void gradient(const char* name, const std::string& path,
                const Tensor& dx) override;
  Tensor choice(const char* name, const std::string& path,
                const Tensor& ids) override;

  const NamedValues& values() const { return values_; }
  // Says which choice could not be used.
  const absl::Status& status() const { return status_; }
  // Rows whose tied scores were resolved as the golden did.
  int64_t rows_tied() const { return rows_tied_; }

 private:
  void keep(const std::string& key, Values values);

  NamedValues values_;
  Tensor injected(const std::string& key, bool keys, const Tensor& ids);
  Tensor tie_broken(const std::string& key, const Tensor& ids);

  const NamedValues* choices_;
  const NamedValues& ties_;
  int64_t rows_tied_ = 0;
  absl::Status status_;
};

}  // namespace tapeline
