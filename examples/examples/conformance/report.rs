//! What was compared, and the table of it.

use std::fmt::Write;

use serde_json::json;

/// One comparison.
pub(crate) struct Check {
    /// What of the case was compared.
    pub(crate) what: String,
    /// How many values.
    pub(crate) values: usize,
    /// The worst error, in `unit`.
    pub(crate) error: f64,
    /// The most it may be.
    pub(crate) allowed: f64,
    /// What error and allowance count.
    pub(crate) unit: String,
}

impl Check {
    pub(crate) fn passed(&self) -> bool {
        // Not `error > allowed`: a NaN is a failure.
        self.error <= self.allowed
    }
}

/// How a case ended.
enum Ending {
    Compared(Vec<Check>),
    Failed(String),
    Skipped(String),
}

/// Everything that was compared, in order.
#[derive(Default)]
pub(crate) struct Report {
    cases: Vec<(String, Ending)>,
}

impl Report {
    /// A case that ran to its end.
    pub(crate) fn compared(&mut self, case: String, checks: Vec<Check>) {
        let ending = match checks.is_empty() {
            true => Ending::Failed("nothing was compared".into()),
            false => Ending::Compared(checks),
        };
        self.cases.push((case, ending));
    }

    /// A case that could not be run.
    pub(crate) fn failed(&mut self, case: String, error: impl ToString) {
        self.cases.push((case, Ending::Failed(error.to_string())));
    }

    /// A case of a kind this program does not know.
    pub(crate) fn skipped(&mut self, case: String, why: impl ToString) {
        self.cases.push((case, Ending::Skipped(why.to_string())));
    }

    /// Whether every case that is known passed, and there was one.
    pub(crate) fn passed(&self) -> bool {
        let (passed, failed, _) = self.counts();
        failed == 0 && passed > 0
    }

    /// Cases passed, failed, skipped.
    fn counts(&self) -> (usize, usize, usize) {
        let mut counts = (0, 0, 0);
        for (_, ending) in &self.cases {
            match ending {
                Ending::Compared(checks) if checks.iter().all(Check::passed) => counts.0 += 1,
                Ending::Skipped(_) => counts.2 += 1,
                _ => counts.1 += 1,
            }
        }
        counts
    }

    /// One JSON object a line, a summary at the end.
    pub(crate) fn json(&self) -> String {
        let mut out = String::new();
        let mut line = |value: serde_json::Value| {
            out.push_str(&value.to_string());
            out.push('\n');
        };
        for (case, ending) in &self.cases {
            match ending {
                Ending::Compared(checks) => {
                    for c in checks {
                        // JSON has no NaN: an error without a number is null.
                        line(
                            json!({"case": case, "compared": c.what, "values": c.values, "max_error": c.error,
                            "allowed": c.allowed, "unit": c.unit, "verdict": verdict(c)}),
                        );
                    }
                }
                Ending::Failed(error) => {
                    line(json!({"case": case, "error": error, "verdict": "FAILED"}))
                }
                Ending::Skipped(why) => {
                    line(json!({"case": case, "reason": why, "verdict": "skipped"}))
                }
            }
        }
        let (passed, failed, skipped) = self.counts();
        line(json!({"summary": {"passed": passed, "failed": failed, "skipped": skipped}}));
        out
    }

    /// A table for people.
    pub(crate) fn table(&self) -> String {
        let header = [
            "case",
            "compared",
            "values",
            "max error",
            "allowed",
            "verdict",
        ]
        .map(str::to_owned);
        let mut rows = vec![header];
        let mut notes = Vec::new();
        for (case, ending) in &self.cases {
            match ending {
                Ending::Compared(checks) => rows.extend(checks.iter().map(|c| {
                    [
                        case.clone(),
                        c.what.clone(),
                        c.values.to_string(),
                        number(c.error),
                        format!("{} {}", number(c.allowed), c.unit),
                        verdict(c).to_owned(),
                    ]
                })),
                Ending::Failed(error) => notes.push(format!("FAILED   {case}: {error}")),
                Ending::Skipped(why) => notes.push(format!("skipped  {case}: {why}")),
            }
        }
        let width = |column: usize| {
            rows.iter()
                .map(|r| r[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; 6] = std::array::from_fn(width);
        let mut out = String::new();
        for row in &rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
                // Numbers to the right.
                let padded = match i {
                    2 | 3 => format!("{cell:>width$}  "),
                    _ => format!("{cell:<width$}  "),
                };
                line.push_str(&padded);
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        for note in &notes {
            out.push_str(note);
            out.push('\n');
        }
        let (passed, failed, skipped) = self.counts();
        let _ = writeln!(
            out,
            "{passed} cases passed, {failed} failed, {skipped} skipped"
        );
        out
    }
}

fn verdict(check: &Check) -> &'static str {
    if check.passed() { "ok" } else { "FAILED" }
}

fn number(v: f64) -> String {
    match v {
        0.0 => "0".into(),
        v if v.fract() == 0.0 && v.abs() < 1e9 => format!("{v}"),
        v if v.abs() >= 1e-3 && v.abs() < 1e6 => format!("{v:.4}"),
        v => format!("{v:.2e}"),
    }
}
