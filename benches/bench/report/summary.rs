//! Groups the results by measurement. Each group contains the results of all rounds.

use crate::program::{LIMIT, Link, WALPOST};
use crate::results::{Cost, Drain, Steady};
use crate::stats::Spread;

/// The results of one program at one value of the series' parameter, in all rounds.
pub(crate) struct Drains<'a> {
    pub(crate) rounds: Vec<&'a Drain>,
    /// For each round, the result of pg_recvlogical with the same backlog and the same kind of
    /// connection.
    limits: Vec<Option<&'a Drain>>,
}

/// Groups the drains of a series by the value of the series' parameter, the program and the link.
/// The groups are ordered by their first measurement.
pub(crate) fn groups<'a>(drains: &'a [Drain], series: &str) -> Vec<Drains<'a>> {
    let series_drains = || drains.iter().filter(|drain| drain.series == series);
    let key = |drain: &'a Drain| (&drain.point, &drain.program, drain.link);
    distinct(series_drains().map(key))
        .into_iter()
        .map(|group| {
            let rounds: Vec<_> = series_drains()
                .filter(|drain| key(drain) == group)
                .collect();
            let limits = rounds.iter().map(|drain| {
                series_drains().find(|limit| {
                    limit.program == LIMIT
                        && limit.link == drain.link
                        && limit.round == drain.round
                        && limit.backlog == drain.backlog
                })
            });
            Drains {
                limits: limits.collect(),
                rounds,
            }
        })
        .collect()
}

/// Returns the first group of drains in which the given program used the given link, regardless of
/// the value of the series' parameter.
pub(crate) fn find<'a, 'b>(
    groups: &'b [Drains<'a>],
    program: &str,
    link: Link,
) -> Option<&'b Drains<'a>> {
    groups
        .iter()
        .find(|group| group.program() == program && group.link() == link)
}

impl<'a> Drains<'a> {
    pub(crate) fn program(&self) -> &'a str {
        &self.rounds[0].program
    }

    pub(crate) fn link(&self) -> Link {
        self.rounds[0].link
    }

    pub(crate) fn point(&self) -> &'a str {
        &self.rounds[0].point
    }

    pub(crate) fn is_limit(&self) -> bool {
        self.program() == LIMIT
    }

    pub(crate) fn is_walpost(&self) -> bool {
        self.program() == WALPOST
    }

    /// Returns the median and range of a value across all rounds. `figure` computes the value of
    /// each drain.
    pub(crate) fn spread_of(&self, figure: impl Fn(&Drain) -> f64) -> Option<Spread> {
        Spread::from_values(self.rounds.iter().map(|drain| figure(drain)))
    }

    pub(crate) fn rate(&self) -> Option<Spread> {
        let rates = self.rounds.iter();
        Spread::from_values(rates.filter_map(|drain| drain.measured.rows_per_second))
    }

    /// Returns the ratio of the program's rate to pg_recvlogical's rate in the same round.
    pub(crate) fn ratio_to_limit(&self) -> Option<Spread> {
        let rounds = self.rounds.iter().zip(&self.limits);
        Spread::from_values(rounds.filter_map(|(drain, limit)| {
            let limit = (*limit)?.measured.rows_per_second?;
            Some(drain.measured.rows_per_second? / limit)
        }))
    }

    /// Like [`Self::spread_of`], but divides each value by the number of rows, in millions.
    pub(crate) fn per_million(&self, figure: impl Fn(&Drain) -> f64) -> Option<Spread> {
        self.spread_of(|drain| figure(drain) * 1e6 / drain.backlog.rows as f64)
    }
}

/// Returns the results of one program at one rate, in all rounds.
pub(crate) fn steady<'a>(rounds: &'a [Steady], program: &str, per_second: u32) -> Vec<&'a Steady> {
    let matches = |round: &&Steady| round.program == program && round.per_second == per_second;
    rounds.iter().filter(matches).collect()
}

/// Groups the rounds by delivery method. The groups are ordered by their first measurement.
pub(crate) fn ways(costs: &[Cost]) -> Vec<Vec<&Cost>> {
    distinct(costs.iter().map(|cost| cost.way.as_str()))
        .into_iter()
        .map(|way| costs.iter().filter(|cost| cost.way == way).collect())
        .collect()
}

pub(crate) fn distinct<T: PartialEq>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}
